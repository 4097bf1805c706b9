"""Chat templates as twenty families write conversations: their headers, ends and habits, in our own words. The tokens
that begin with <|im_ and <|endof are single tokens of the tests' tokenizer, others are letters."""

from tiny import CHATML

_EACH = "{% for m in messages %}"
_TOOLS = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
_CALLS = "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"


def _turns(begin: str, end: str, prompt: str = "assistant", first: str = "", content: str = "m.content") -> str:
    """Turns of `begin` (with {} for the role), the content and `end`."""
    begins = begin.replace("{}", "{{ m.role }}")
    asked = begin.replace("{}", prompt)
    last = "{% if add_generation_prompt %}" + asked + "{% endif %}"
    return first + _EACH + begins + "{{ " + content + " }}" + end + "{% endfor %}" + last


PLAIN = {
    "ChatML": CHATML,
    "ChatML, a system message of its own": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
    ),
    "Llama 2": (
        "{% if messages[0].role == 'system' %}{% set said = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}<s>[INST] {{ (said if loop.first else '') ~ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }} <|endoftext|>{% endif %}{% endfor %}"
    ),
    "Llama 3": _turns("<|start|>{}<|end|>\n\n", "<|im_end|>", first="<|begin|>", content="m.content | trim"),
    "Mistral": (
        _EACH + "{% if m.role == 'assistant' %} {{ m.content }}<|endoftext|>{% else %}[INST] {{ m.content }} [/INST]"
        "{% endif %}{% endfor %}"
    ),
    "Gemma": (
        "<bos>{% if messages[0].role == 'system' %}{% set said = messages[0].content ~ '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
        "{{ (said if loop.first else '') ~ (m.content | trim) }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "Phi 3": _turns("<|{}|>\n", "<|im_end|>\n") + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
    "Phi 4": _turns("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "Zephyr": _turns("<|{}|>\n", "<|endoftext|>\n"),
    "Vicuna": (
        _EACH + "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}USER: {{ m.content }} "
        "{% else %}ASSISTANT: {{ m.content }}<|endoftext|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "Alpaca": (
        _EACH + "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n"
        "{{ m.content }}\n\n{% else %}### Response:\n{{ m.content }}<|endoftext|>\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "DeepSeek": (
        "<begin>" + _EACH + "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<User>{{ m.content }}"
        "{% else %}<Assistant>{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<Assistant>{% endif %}"
    ),
    "Command R": (
        "<BOS>"
        + _EACH
        + "<TURN>{{ {'system': '<SYS>', 'user': '<USER>', 'assistant': '<BOT>'}[m.role] }}{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<TURN><BOT>{% endif %}"
    ),
    "OLMo": _turns("<|{}|>\n", "<|endoftext|>\n", first="<|endoftext|>"),
    "Falcon": _turns("{}: ", "<|im_end|>\n"),
}
TOOLS = {
    "Qwen 2.5": (
        "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
        + _TOOLS
        + "<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
        "{% endif %}" + _EACH + "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "Hermes": _turns(
        "<|im_start|>{}\n",
        _CALLS + "<|im_end|>\n",
        first="{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}",
    ),
    "Granite": _turns(
        "<|start|>{}<|sep|>",
        _CALLS + "<|im_end|>\n",
        first="{% if tools %}<|start|>tools<|sep|>" + _TOOLS + "{% endif %}",
    ),
    "Mistral, tools": (
        "{% if tools %}[AVAILABLE]{{ tools | tojson }}[/AVAILABLE]{% endif %}"
        + _EACH
        + "{% if m.role == 'assistant' %}{% if m.tool_calls %}[CALLS]{% for call in m.tool_calls %}"
        "{% if call.id is defined and call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
        "{{ call.function | tojson }}{% endfor %}{{ m.content }}<|endoftext|>{% else %} {{ m.content }}<|endoftext|>"
        "{% endif %}{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}[INST] {{ m.content }} [/INST]"
        "{% endif %}{% endfor %}"
    ),
    "Functions": (  # as gpt-oss: no JSON schema, but the names and what they are
        "{% for tool in tools or [] %}{% set f = tool.function %}// {{ f.description }}\ntype {{ f.name }} = (_: { "
        "{% for name, what in f.parameters.properties.items() %}\n// {{ what.description }}\n{{ name }}: "
        "{{ what.type }},{% endfor %} }) => any;\n{% endfor %}" + _EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls %} to={{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
TEMPLATES = PLAIN | TOOLS
