"""The report as one HTML file: no network, light and dark, for a screen or for paper."""
