"""MOVED"""
