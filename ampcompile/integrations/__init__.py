"""The backend inside other people's training loops: each file is imported on request, and needs the package it names."""
