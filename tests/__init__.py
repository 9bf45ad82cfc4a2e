"""The suite of the template: what it renders, and what the rendered projects do."""
