{% include "example/" ~ cookiecutter.example ~ "/model.py" %}
