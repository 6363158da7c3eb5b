package command

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/schemas"
)

// parseLogits reads the value of --logits, FORM[:K or IDS][:DTYPE][:KIND], as the field of a prompt. The error shows
// the form.
func parseLogits(s string) (any, error) {
	bad := fmt.Errorf("%q; must be none, topk, topk:20, ids:3,7 or full, and may end with :F16 or another dtype, "+
		":processed and :answers=0,2", s)
	parts := strings.Split(s, ":")
	out := map[string]any{"form": parts[0]}
	if !slices.Contains(schemas.LogitsForms, parts[0]) {
		return nil, bad
	}
	for i, part := range parts[1:] {
		switch {
		case parts[0] == schemas.LogitsNone: // no logits, so no options
			return nil, bad
		case slices.Contains(schemas.LatentsDTypes, part):
			out["dtype"] = part
		case slices.Contains(schemas.LogitsKinds, part):
			out["kind"] = part
		case strings.HasPrefix(part, "answers="):
			answers, err := parseIntegers(strings.TrimPrefix(part, "answers="))
			if err != nil {
				return nil, bad
			}
			out["answers"] = answers
		case i == 0 && parts[0] == schemas.LogitsTopK:
			k, err := strconv.ParseInt(part, 10, 64)
			if err != nil {
				return nil, bad
			}
			out["k"] = k
		case i == 0 && parts[0] == schemas.LogitsIDs:
			ids, err := parseIntegers(part)
			if err != nil {
				return nil, bad
			}
			out["ids"] = ids
		default:
			return nil, bad
		}
	}
	return out, nil
}

// parseIntegers reads integers separated by commas.
func parseIntegers(s string) (list []int64, err error) {
	for part := range strings.SplitSeq(s, ",") {
		n, err := strconv.ParseInt(strings.TrimSpace(part), 10, 64)
		if err != nil {
			return nil, err
		}
		list = append(list, n)
	}
	return list, nil
}

// milliseconds reads a duration, and returns milliseconds.
func milliseconds(s string) (any, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d != d.Truncate(time.Millisecond) {
		return nil, fmt.Errorf("%q; must be a duration such as 30s or 500ms", s)
	}
	return d.Milliseconds(), nil
}

// parseParams reads parameters of an interaction, NAME=VALUE,..., each name once. The error shows the form.
func parseParams(s string) (any, error) {
	out := map[string]any{}
	for part := range strings.SplitSeq(s, ",") {
		name, value, ok := strings.Cut(part, "=")
		if _, twice := out[name]; !ok || name == "" || twice {
			return nil, fmt.Errorf("%q; must be NAME=VALUE, each name once, with commas between them", s)
		}
		out[name] = value
	}
	return out, nil
}

// messagesOf returns the messages of --messages (nil without the flag), and the texts of the prompts: with a
// conversation its last message. Prompts beside --messages are an error.
func (p *promptFlags) messagesOf(texts []string) ([]any, []string, error) {
	if p.messages == "" {
		return nil, texts, nil
	}
	if len(texts) > 0 || p.file != "" {
		return nil, nil, errors.New("--messages: given; must be the only prompt: leave out the others, and --prompts")
	}
	list, err := readMessages(p.messages)
	if err != nil {
		return nil, nil, err
	}
	last, _ := list[len(list)-1].(map[string]any)["content"].(string)
	return list, []string{last}, nil
}

// setTextOfMessages makes the last message the text of a prompt that has messages of its own; the text names the prompt
// in tables.
func (q *prompt) setTextOfMessages() {
	list, ok := q.body["messages"].([]any)
	if !ok || len(list) == 0 {
		return
	}
	if last, ok := list[len(list)-1].(map[string]any); ok && q.text == "" {
		q.text, _ = last["content"].(string)
	}
	if q.body["prompt"] == nil {
		q.body["prompt"] = ""
	}
}

// useMessages has the whole conversation of a record sent to a language model, with the system's message, not its
// last message alone. It fails for prompts with substitutes, which have no messages.
func (q *prompt) useMessages() error {
	if q.messages == nil {
		return nil
	}
	if q.body["substitutes"] != nil {
		return errors.New("--refill-fresh: given; must be absent where prompts of a language model have system " +
			"messages, which substitutes cannot have")
	}
	if metadata, ok := q.body["metadata"].(map[string]any); ok {
		delete(metadata, dataset.System+"prompt") // it is in the messages now
	}
	list := make([]any, len(q.messages))
	for i, v := range q.messages {
		m := maps.Clone(v.(map[string]any))
		if list[i] = m; m["role"] == schemas.RoleUser {
			m["content"] = q.text // as the template makes it
		}
	}
	q.body["messages"], q.body["prompt"], q.messages = list, "", nil
	return nil
}

// maxMessages bounds the file of a conversation, in bytes.
const maxMessages = 4 << 20

// readMessages reads the file of --messages: a list of messages, or an object with one under "messages". An error names
// the message and what it must be.
func readMessages(path string) ([]any, error) {
	info, err := os.Stat(path)
	if err == nil && info.Size() > maxMessages {
		err = fmt.Errorf("%s: %d bytes; must be at most %d", path, info.Size(), maxMessages)
	}
	if err != nil {
		return nil, fmt.Errorf("--messages: %w", err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--messages: %w", err)
	}
	if i := invalidUTF8(data); i >= 0 {
		return nil, fmt.Errorf("--messages: %s: byte %d; must be UTF-8", path, i)
	}
	v, err := dataset.ParseJSON(data)
	if err != nil {
		return nil, fmt.Errorf("--messages: %s: %w", path, err)
	}
	if object, ok := v.(map[string]any); ok {
		v = object["messages"]
		for name := range object {
			if _, list := v.([]any); list && name != "messages" {
				return nil, fmt.Errorf("--messages: %s: %s: given; must be absent: nothing but messages is shown to "+
					"the model", path, name)
			}
		}
	}
	list, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf(`--messages: %s: must be a JSON list of {"role", "content"}, or an object with it under `+
			`"messages"`, path)
	}
	out := []any{}
	for i, item := range list {
		m, _ := item.(map[string]any)
		role, ok := m["role"].(string)
		if !ok {
			return nil, fmt.Errorf(`--messages: %s: message %d; must have a "role" and a "content", both texts`, path,
				i)
		}
		content, err := dataset.MessageText(fmt.Sprintf("message %d", i), m)
		if err != nil {
			return nil, fmt.Errorf("--messages: %s: %w", path, err)
		}
		out = append(out, map[string]any{"role": role, "content": content})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("--messages: %s: no messages; must be at least one", path)
	}
	return out, nil
}

// invalidUTF8 returns the index of the first byte that is not part of valid UTF-8; -1 if there is none.
func invalidUTF8(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return -1
}
