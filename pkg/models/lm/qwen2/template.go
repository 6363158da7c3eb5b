package qwen2

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/models/jinja"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// template is the chat template of a folder, with the special tokens that it can use.
type template struct {
	program *jinja.Template
	tokens  map[string]any
	example string
	dated   bool // it asks for the day
	// variables are those of lm.Language.With.
	variables map[string]string
}

// String shows how it writes a question, for people.
func (t *template) String() string { return fmt.Sprintf("writes %q as %q", question, t.example) }

const question = "QUESTION"

// trialConversations are rendered when a template is read, to find faults early.
var trialConversations = [][]lm.Message{
	{{Role: "user", Content: question}},
	{{Role: "system", Content: "SYSTEM"}, {Role: "user", Content: question}},
	{{Role: "user", Content: question}, {Role: "assistant", Content: "ANSWER"}, {Role: "user", Content: "AGAIN"}},
}

// parseTemplate parses a chat template and tries it when a model is opened, so that a fault shows then and not in the
// first sample. tokens are its variables. It must write at least one of the trial conversations, and in none may it use
// an unsupported feature or take too much time or memory. It may refuse some, such as one with a system message.
func parseTemplate(text string, tokens map[string]any) (*template, error) {
	program, err := jinja.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("chat_template: %w", err)
	}
	t := &template{program: program, tokens: tokens, dated: strings.Contains(text, jinja.StrftimeNow)}
	t.variables = map[string]string{jinja.StrftimeNow: time.DateOnly} // its example of a day
	defer func() { t.variables = nil }()
	var first error
	for _, messages := range trialConversations {
		text, err := t.renderMessages(messages)
		switch {
		case errors.Is(err, jinja.ErrUnsupported), errors.Is(err, jinja.ErrLimit):
			return nil, err
		case err == nil && t.example == "":
			t.example = text
		case err != nil && first == nil:
			first = err
		}
	}
	if t.example == "" {
		if first == nil {
			first = errors.New("chat_template: it writes nothing")
		}
		return nil, first
	}
	return t, nil
}

// renderMessages writes a conversation up to the begin of the answer. An error is the template's:
// it may refuse messages.
func (t *template) renderMessages(messages []lm.Message) (string, error) {
	list := make([]any, len(messages))
	for i, m := range messages {
		list[i] = jinja.Dict{{Key: "role", Value: m.Role}, {Key: "content", Value: m.Content}}
	}
	variables := map[string]any{"messages": list, "tools": nil, "documents": nil, "add_generation_prompt": true}
	for name, token := range t.tokens {
		variables[name] = token
	}
	for name, value := range t.variables {
		variables[name] = value
	}
	if day, ok := t.variables[jinja.StrftimeNow]; ok {
		at, err := time.Parse(time.DateOnly, day)
		if err != nil {
			return "", fmt.Errorf("chat_template_kwargs: %s: %q; must be a day, such as 2026-11-28", jinja.StrftimeNow,
				day)
		}
		variables[jinja.StrftimeNow] = jinja.Day(at)
	}
	text, err := t.program.Render(variables)
	if err != nil {
		return "", fmt.Errorf("chat_template: %w", err)
	}
	return text, nil
}

// renderReply returns the text between an answer to a conversation and the next answer. The
// template must write the conversation before as it did without the answer, and the answer as it
// was generated, else it is an error; only white space at the ends of the answer may be missing.
func (t *template) renderReply(before []lm.Message, answer string, messages []lm.Message) (string, error) {
	begin, err := t.renderMessages(before)
	if err != nil {
		return "", err
	}
	whole, err := t.renderMessages(slices.Concat(before, []lm.Message{{Role: "assistant", Content: answer}}, messages))
	if err != nil {
		return "", err
	}
	if rest, ok := strings.CutPrefix(whole, begin); ok {
		right := strings.TrimRight(answer, whiteSpace)
		for _, written := range []string{
			answer, right, strings.TrimLeft(answer, whiteSpace),
			strings.TrimLeft(right, whiteSpace),
		} {
			if between, ok := strings.CutPrefix(rest, written); ok {
				return between, nil
			}
		}
	}
	return "", errors.New("chat_template: it writes an answer that lies behind in another way than it was generated, " +
		"without its thoughts for instance; conversations of several answers need a template that leaves answers as " +
		"they are")
}

const whiteSpace = " \t\r\n"

// templateFile is the first file in which transformers looks for a template, sideFile the second.
const (
	templateFile = "chat_template.jinja"
	sideFile     = "tokenizer_config.json"
)

// readTemplate reads the chat template of a folder, in the same files as transformers. No template,
// and one that parseTemplate refuses, are errors that name the file.
func readTemplate(folder *safetensors.Folder) (*template, error) {
	config := map[string]json.RawMessage{}
	sideErr := nn.ReadJSON(folder, sideFile, nil, &config)
	if sideErr != nil && !errors.Is(sideErr, fs.ErrNotExist) {
		return nil, sideErr
	}
	source := templateFile
	b, err := folder.Read(templateFile, nn.MaxConfigFile)
	text := string(b)
	if errors.Is(err, fs.ErrNotExist) {
		source, err = sideFile, sideErr
		if err == nil {
			text, err = sideTemplate(config)
		}
	}
	if err != nil {
		return nil, err
	}
	tokens, err := specialTokens(config, text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", sideFile, err)
	}
	t, err := parseTemplate(text, tokens)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	return t, nil
}

// sideTemplate returns the template of tokenizer_config.json: the only one, or the default of several. readTemplate
// calls it where the folder has no chat_template.jinja. No template, or one of another form, is an error: Open fails.
func sideTemplate(config map[string]json.RawMessage) (text string, err error) {
	raw := config["chat_template"]
	var named []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	switch {
	case raw == nil || string(raw) == "null":
		return "", fmt.Errorf("%s: chat_template is missing, and there is no %s; one must be there, as conversations "+
			"are written by it", sideFile, templateFile)
	case json.Unmarshal(raw, &text) == nil:
		return text, nil
	case strictjson.Unmarshal(raw, nil, &named) == nil:
		for _, t := range named {
			if t.Name == "default" {
				return t.Template, nil
			}
		}
	}
	return "", fmt.Errorf("%s: chat_template: must be a text, or a list of templates of which one has the name default",
		sideFile)
}

// specialTokens returns the variables of a template that name tokens, as in transformers: from the folder, else the
// defaults of the class of the tokenizer. A token that is null is left out.
func specialTokens(config map[string]json.RawMessage, template string) (map[string]any, error) {
	var class string
	if raw := config["tokenizer_class"]; raw != nil {
		if err := json.Unmarshal(raw, &class); err != nil {
			return nil, fmt.Errorf("tokenizer_class: %w", err)
		}
	}
	tokens := map[string]any{}
	for _, name := range []string{
		"bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
		"mask_token",
	} {
		raw, there := config[name]
		if !there {
			switch strings.TrimSuffix(class, "Fast") {
			case "", "Qwen2Tokenizer":
				if name == "eos_token" || name == "unk_token" || name == "pad_token" {
					tokens[name] = "<|endoftext|>"
				}
			case "PreTrainedTokenizer", "TokenizersBackend":
			default:
				if strings.Contains(template, name) {
					return nil, fmt.Errorf("%s: none; must be there, or null: the chat template reads it, and what a "+
						"%s has without it is not known here", name, class)
				}
			}
			continue
		}
		var text *string
		var token struct{ Content *string }
		if json.Unmarshal(raw, &text) != nil {
			if err := json.Unmarshal(raw, &token); err != nil || token.Content == nil {
				return nil, fmt.Errorf("%s: %.40s; must be a token: a text, or an object with its content", name, raw)
			}
			text = token.Content
		}
		if text != nil {
			tokens[name] = *text
		}
	}
	return tokens, nil
}
