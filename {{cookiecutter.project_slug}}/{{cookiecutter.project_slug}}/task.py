{% include "example/" ~ cookiecutter.example ~ "/task.py" %}
