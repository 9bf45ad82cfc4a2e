{% include "strategy/" ~ cookiecutter.checkpoint ~ ".py" %}
