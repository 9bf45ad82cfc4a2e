{% include "example/" ~ cookiecutter.example ~ "/settings.py" %}
