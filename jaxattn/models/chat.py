"""A model's own chat template, rendered in a sandbox."""

from jaxattn.errors import CheckpointError


def render_chat(template: str, prompt: str, special_tokens: dict[str, str]) -> str:
    """The conversation of one user `prompt`, up to where the assistant's answer starts.

    Args:
        template: Jinja source, as `tokenizer.chat_template` of a GGUF file or `chat_template` of a folder has it.
        prompt: what the user says.
        special_tokens: the texts of `bos_token` and `eos_token`.

    Raises:
        CheckpointError: the template is not valid or refuses the conversation.

    Example:
        >>> from jaxattn.models.chat import render_chat
        >>> render_chat("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}",
        ...             "Hello", {"bos_token": "<s>"})
        '<s>user: Hello\\n'
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, **special_tokens
        )
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the model's chat template cannot be rendered: {error}") from None


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)
