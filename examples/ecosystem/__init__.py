"""The compiled model inside other people's training loops. Each needs the package it is about."""
