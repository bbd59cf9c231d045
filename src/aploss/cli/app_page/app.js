// The page of `aploss app`: an image is sent once, the threshold moves here.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const by = (id) => document.getElementById(id);
let about = null; // of the runs
let found = null; // in the image
let latest = 0; // number of the image that was sent last

function element(name, attributes = {}, ...children) {
  const made = name === "svg" || attributes.xmlns ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (key !== "xmlns") made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const shape = (name, attributes, ...children) => element(name, { ...attributes, xmlns: SVG }, ...children);

function say(text, bad = false) {
  by("status").textContent = text;
  by("status").className = bad ? "bad" : "";
}

async function ask(path, options) {
  const answer = await fetch(path, options).catch(() => { throw new Error("the server does not answer: is aploss app still running?"); });
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error);
  return document;
}

async function look(file) {
  if (!file) return;
  const number = ++latest;
  say(`looking at ${file.name} ...`);
  try {
    await ready;
    if (file.size > about.max_bytes) {
      throw new Error(`the file has ${Math.round(file.size / 2 ** 20)} MB, at most ${about.max_bytes / 2 ** 20} MB are taken`);
    }
    const answer = await ask("/detect", { method: "POST", body: file, headers: { "X-Aploss": "1" } });
    if (number !== latest) return; // a later image is on its way
    found = answer;
    say(`${file.name}: ${found.width} x ${found.height} pixels`);
    show();
  } catch (error) {
    if (number === latest) say(`${file.name}: ${error.message}`, true);
  }
}

function box(one, scale, classes, named) {
  const [label, score, [left, top, right, bottom]] = one;
  const colour = classes[label].colour;
  const frame = shape("rect", { class: "box", x: left, y: top, width: right - left, height: bottom - top, stroke: colour });
  if (!named) return [frame];
  const text = `${classes[label].name} ${score.toFixed(2)}`;
  const size = 12 * scale, y = Math.max(top, size * 1.3);
  return [
    frame,
    shape("rect", { x: left, y: y - size * 1.3, width: text.length * size * 0.58 + size * 0.6, height: size * 1.3, fill: colour }),
    shape("text", { x: left + size * 0.3, y: y - size * 0.3, "font-size": size }, text),
  ];
}

function panel(run, result) {
  const section = element("section", {}, element("h2", {}, run.name));
  const meaning = run.calibrated ? "calibrated scores: the share of such detections that are right" : "scores are not calibrated";
  if (!result) return section.append(element("p", { class: "about" }, meaning)), section;
  const shown = result.detections.filter((one) => one[1] >= by("threshold").valueAsNumber);
  section.append(element("p", { class: "about" }, `${shown.length} of ${result.detections.length} detections, ${result.seconds.toFixed(2)} s; ${meaning}`));
  const picture = element("div", { class: "picture" }, element("img", { src: found.picture, alt: "the image that was looked at" }));
  const layer = element("svg", { viewBox: `0 0 ${found.width} ${found.height}`, preserveAspectRatio: "none" });
  section.append(picture);
  picture.append(layer);
  const columns = by("runs").clientWidth < 700 ? 1 : about.runs.length;
  const scale = (found.width * columns) / by("runs").clientWidth; // letters of one size on the screen
  for (const one of [...shown].reverse()) layer.append(...box(one, scale, run.classes, by("names").checked));
  const counts = element("ul", { class: "counts" });
  run.classes.forEach((kind, label) => {
    const number = shown.filter((one) => one[0] === label).length;
    const mark = element("svg", { viewBox: "0 0 1 1" }, shape("rect", { width: 1, height: 1, fill: kind.colour }));
    if (number) counts.append(element("li", {}, mark, `${kind.name} ${number}`));
  });
  section.append(counts);
  return section;
}

function show() {
  if (!about) return;
  by("value").textContent = by("threshold").valueAsNumber.toFixed(2);
  by("runs").replaceChildren(...about.runs.map((run, index) => panel(run, found && found.runs[index])));
}

function listen() {
  by("threshold").addEventListener("input", show);
  by("names").addEventListener("change", show);
  window.addEventListener("resize", show);
  by("file").addEventListener("change", () => look(by("file").files[0]));
  const stop = (event) => event.preventDefault();
  for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, (event) => { stop(event); by("drop").classList.add("over"); });
  for (const kind of ["dragleave", "drop"]) document.addEventListener(kind, (event) => { stop(event); by("drop").classList.remove("over"); });
  document.addEventListener("drop", (event) => look(event.dataTransfer.files[0]));
  document.addEventListener("paste", (event) => look(event.clipboardData.files[0]));
  by("drop").addEventListener("keydown", (event) => { if (["Enter", " "].includes(event.key)) { stop(event); by("file").click(); } });
}

async function start() {
  about = await ask("/about");
  by("threshold").value = about.runs[0].threshold ?? 0.5;
  show();
}

const ready = start();
listen();
ready.catch((error) => say(error.message, true));
