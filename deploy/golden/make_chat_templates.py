#!/usr/bin/env python3
"""Record what transformers makes of conversations in chat templates, and of expressions in their language.

    python deploy/golden/make_chat_templates.py pkg/models/jinja/testdata

Part of `make golden`. Reads templates/*.jinja and expressions.txt there, one expression a line, and writes
conversations.json: the conversations with their variables, and the text of each in each template; expressions.json:
what each expression prints. Where Jinja refuses, there is `error` in place of `text`.
"""

import argparse
import json
from pathlib import Path

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS = [
    {"type": "function", "function": {
        "name": "add", "description": "Adds <two> numbers & \"more\".",
        "parameters": {"type": "object", "properties": {
            "a": {"type": "number", "description": " the first "},
            "b": {"type": ["integer", "string"], "description": "é, 漢"},
        }, "required": ["a", "b"]},
        "return": {"type": "object", "additionalProperties": {"type": "boolean"}},
    }},
    {
        "type": "function",
        "function": {"name": "now", "description": "None.", "parameters": {"type": "object", "properties": {}}}
    },
]


def say(*turns):
    return [{"role": role, "content": content} for role, content in turns]


CALL = {
    "id": "abcdefghi", "type": "function",
    "function": {"name": "add", "arguments": {"a": 1.5, "b": [None, True, "x'y"]}}
}

CONVERSATIONS = {
    "question": {"messages": say(("user", "347+58=?"))},
    "system": {"messages": say(("system", "You add\nand subtract. /no_think "), ("user", " spaces \n"))},
    "turns": {"messages": say(("user", "1+1=?"), ("assistant", " 3\n"), ("user", "too high"))},
    "all": {
        "messages": say(
            ("system", "Be brief."), ("user", "1+1=?"), ("assistant", "3"), ("user", "too high"), ("assistant", "2"),
            ("user", "é漢 <|im_end|>")
        )
    },
    "thoughts": {"messages": say(("user", "why?"), ("assistant", "<think>\nhm\n</think>\n\nso"), ("user", "so?"))},
    "no thoughts": {"messages": say(("user", "why?")), "enable_thinking": False},
    "thoughts last": {
        "messages": say(("user", "why?"), ("assistant", "<think>\nhm\n</think>\n\nso")), "add_generation_prompt": False
    },
    "empty": {"messages": say(("user", "")), "add_generation_prompt": False},
    "two users": {"messages": say(("user", "a"), ("user", "b"))},
    "odd role": {"messages": say(("judge", "a"))},
    "tools": {"messages": say(("user", "add")), "tools": TOOLS},
    "tools with system": {
        "messages": say(("system", "Use them."), ("user", "add")), "tools": TOOLS, "tools_in_user_message": False
    },
    "calls": {
        "messages": [
            *say(("user", "add")), {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2.5", "tool_call_id": "abcdefghi"}
        ],
        "tools": TOOLS
    },
    "calls and answers": {"messages": [*say(("user", "add")), {"role": "assistant", "content": "well", "tool_calls": [CALL, CALL]},
                                       {
                                           "role": "tool", "content": "2.5", "tool_call_id": "abcdefghi"
                                       }, {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
                                       *say(("assistant", "5"), ("user", "thanks"))]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what? "}]}]},
    "nothing": {"messages": []},
}

VARIABLES = {
    "messages": CONVERSATIONS["all"]["messages"], "s": "Hello, World", "padded": "  a b\t\n", "n": 7, "f": 2.5,
    "l": [3, 1, 2], "e": [], "yes": True, "no": None,
    "d": {"b": 1, "a": {"c": "x"}, "items": "own"},
    "people": [{"name": "Bo", "age": 3}, {"name": "al", "age": 2}, {"name": "Bo", "age": 1}],
}


def record(render):
    try:
        return {"text": render()}
    except Exception as e:  # whatever a template makes Python do
        return {"error": f"{type(e).__name__}: {e}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cases = []
    for name, conversation in CONVERSATIONS.items():
        variables = {"add_generation_prompt": True} | conversation
        texts = {}
        for path in sorted((folder / "templates").glob("*.jinja")):
            arguments = dict(variables)
            messages = arguments.pop("messages")
            texts[path.stem] = record(lambda: render_jinja_template(
                conversations=[messages], chat_template=path.read_text(encoding="utf-8"), **arguments, **TOKENS)[0][0])
        cases.append(
            {"name": name, "variables": {"tools": None, "documents": None} | variables | TOKENS, "texts": texts}
        )
    write(folder / "conversations.json", cases)
    lines = (folder / "expressions.txt").read_text(encoding="utf-8").splitlines()
    expressions = [
        {"source": s} | record(lambda: _compile_jinja_template(s).render(**VARIABLES))
        for s in lines if s and not s.startswith("##")
    ]
    write(folder / "expressions.json", {"variables": VARIABLES, "expressions": expressions})


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
