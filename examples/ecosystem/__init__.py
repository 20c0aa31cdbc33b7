"""The compiled model inside other people's training loops. Each needs the package it is about.

Each trains in one of three ways: "float32"; "autocast", eagerly, as the framework's own mixed precision does; "amp".
"""
