{% include "strategy/test_" ~ cookiecutter.checkpoint ~ ".py" %}
