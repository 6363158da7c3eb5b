package qwen2

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/safetensors"
)

// The marks of a turn in every template of the family.
const (
	turnStart = "<|im_start|>"
	turnEnd   = "<|im_end|>"
)

// template is a chat template that is understood: turns between marks, and a system message
// where a conversation has none.
type template struct {
	system    string
	hasSystem bool
}

// String says what it writes.
func (t *template) String() string {
	s := turnStart + "ROLE ... " + turnEnd
	if t.hasSystem {
		s += fmt.Sprintf("; a conversation without a system message begins with %q", t.system)
	}
	return s
}

// newline is one in a string of a template, written or escaped.
const newline = `(?:\\n|\n)`

// Templates are programs in a language of their own. The family's few are recognised by their
// text instead: what they do without tools is what is left of them.
var templates = []*regexp.Regexp{
	// Qwen1.5 and Qwen2, and those without a system message of their own.
	regexp.MustCompile(`^{%-? ?for message in messages ?-?%}` +
		`(?:{%-? ?if loop\.first and messages\[0\]\['role'\] != 'system' ?-?%}{{-? ?'<\|im_start\|>system` + newline + `(?P<system>(?:[^'\\]|\\.)*)<\|im_end\|>` + newline + `' ?-?}}{%-? ?endif ?-?%})?` +
		`{{-? ?'<\|im_start\|>' \+ message\['role'\] \+ '` + newline + `' \+ message\['content'\] \+ '<\|im_end\|>' \+ '` + newline + `' ?-?}}` +
		`{%-? ?endfor ?-?%}{%-? ?if add_generation_prompt ?-?%}{{-? ?'<\|im_start\|>assistant` + newline + `' ?-?}}{%-? ?endif ?-?%}$`),
	// Qwen2.5, with branches for tools, which are never there.
	regexp.MustCompile(`(?s)^{%- if tools %} {{- '<\|im_start\|>system\\n' }} .*?{%- else %} {%- if messages\[0\]\['role'\] == 'system' %} ` +
		`{{- '<\|im_start\|>system\\n' \+ messages\[0\]\['content'\] \+ '<\|im_end\|>\\n' }} {%- else %} ` +
		`{{- '<\|im_start\|>system\\n(?P<system>(?:[^'\\]|\\.)*)<\|im_end\|>\\n' }} {%- endif %} {%- endif %} ` +
		`{%- for message in messages %} {%- if \(message\.role == "user"\) or \(message\.role == "system" and not loop\.first\) or \(message\.role == "assistant" and not message\.tool_calls\) %} ` +
		`{{- '<\|im_start\|>' \+ message\.role \+ '\\n' \+ message\.content \+ '<\|im_end\|>' \+ '\\n' }} ` +
		`{%- elif message\.role == "assistant" %} .*{%- elif message\.role == "tool" %} .*{%- endfor %} ` +
		`{%- if add_generation_prompt %} {{- '<\|im_start\|>assistant\\n' }} {%- endif %}$`),
}

var blank = regexp.MustCompile(`\s+`)

// parseTemplate recognises a template.
func parseTemplate(text string) (*template, error) {
	for i, re := range templates {
		text := strings.TrimSpace(text)
		if i > 0 {
			text = blank.ReplaceAllString(text, " ")
		}
		m := re.FindStringSubmatch(text)
		if m == nil {
			continue
		}
		system := m[re.SubexpIndex("system")]
		return &template{
			system:    strings.NewReplacer(`\n`, "\n", `\'`, "'", `\\`, `\`).Replace(system),
			hasSystem: strings.Contains(text, "!= 'system'") || i > 0,
		}, nil
	}
	return nil, fmt.Errorf("chat_template: %.60q ... is not understood; must be that of Qwen1.5, Qwen2 or Qwen2.5, or the plain ChatML one", text)
}

// readTemplate finds the template of a folder where transformers does.
func readTemplate(folder *safetensors.Folder) (*template, error) {
	const file = "chat_template.jinja"
	b, err := folder.Read(file, nn.MaxConfigFile)
	if err == nil {
		t, err := parseTemplate(string(b))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		return t, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	const side = "tokenizer_config.json"
	var config struct {
		Template json.RawMessage `json:"chat_template"`
	}
	if err := nn.ReadJSON(folder, side, &config); err != nil {
		return nil, err
	}
	var text string
	var named []struct{ Name, Template string }
	switch {
	case config.Template == nil:
		return nil, fmt.Errorf("%s: chat_template: none, nor a %s; must be there: the model knows no conversations without it", side, file)
	case json.Unmarshal(config.Template, &text) == nil:
	case json.Unmarshal(config.Template, &named) == nil:
		for _, t := range named {
			if t.Name == "default" {
				text = t.Template
			}
		}
	}
	t, err := parseTemplate(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", side, err)
	}
	return t, nil
}

// prompt renders a conversation up to where the assistant speaks.
func (t *template) prompt(messages []lm.Message) string {
	if t.hasSystem && messages[0].Role != "system" {
		messages = append([]lm.Message{{Role: "system", Content: t.system}}, messages...)
	}
	return turns(messages)
}

// reply renders what lies between an answer, whose end is there or not, and the next one.
func (t *template) reply(ended bool, messages []lm.Message) string {
	end := "\n"
	if !ended {
		end = turnEnd + end
	}
	return end + turns(messages)
}

func turns(messages []lm.Message) string {
	var b strings.Builder
	for _, m := range messages {
		b.WriteString(turnStart + m.Role + "\n" + m.Content + turnEnd + "\n")
	}
	b.WriteString(turnStart + "assistant\n")
	return b.String()
}
