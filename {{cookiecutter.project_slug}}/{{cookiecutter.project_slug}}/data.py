{% include "example/" ~ cookiecutter.example ~ "/data.py" %}
