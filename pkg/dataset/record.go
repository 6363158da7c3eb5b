package dataset

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// record gives an object the form of a prompt.
func (d *reader) record(object map[string]any) (*Record, error) {
	switch {
	case d.set.Format == Meander:
		return &Record{Fields: object}, nil
	case d.set.Format == Metadata:
		return metadataRecord(object)
	case d.set.Format == Verl, looksVerl(object):
		return verlRecord(object)
	}
	return d.mixedRecord(object)
}

// looksVerl tells records by their messages: no prompt of this project is a list.
func looksVerl(object map[string]any) bool {
	list, ok := object["prompt"].([]any)
	if !ok || len(list) == 0 {
		return false
	}
	message, ok := list[0].(map[string]any)
	return ok && message["role"] != nil
}

// mixedRecord is a prompt of this project; what that does not have is metadata. Faults
// of fields that a prompt does have are for its reader to find.
func (d *reader) mixedRecord(object map[string]any) (*Record, error) {
	r := &Record{Fields: object}
	var rest []string
	for name := range object {
		if !slices.Contains(d.options.Fields, name) {
			rest = append(rest, name)
		}
	}
	if len(rest) == 0 {
		return r, nil
	}
	metadata, ok := object["metadata"].(map[string]any)
	if object["metadata"] != nil && !ok {
		return r, nil // no prompt: refused whatever is beside it
	}
	if _, ok := r.Prompt(); !ok && object["messages"] == nil {
		return nil, fault("prompt", lookup(object, "prompt"), "must be a text")
	}
	metadata = maps.Clone(metadata)
	if metadata == nil {
		metadata = map[string]any{}
	}
	for _, name := range slices.Sorted(slices.Values(rest)) {
		v := object[name]
		delete(object, name)
		if name == "ground_truth" {
			var err error
			if r.GroundTruth, err = answer(name, v); err != nil {
				return nil, err
			}
			continue
		}
		if err := d.misspelt(name, v); err != nil {
			return nil, err
		}
		if _, twice := metadata[name]; twice {
			return nil, fault(name, v, "must come once; metadata has it too")
		}
		put(metadata, name, v)
	}
	if len(metadata) > 0 {
		object["metadata"] = metadata
	}
	return r, nil
}

// misspelt refuses a name that was probably meant for a field.
func (d *reader) misspelt(name string, v any) error {
	if d.options.Misspelt == nil {
		return nil
	}
	if meant := d.options.Misspelt(name); meant != "" {
		return fault(name, v, "must be a field of a prompt, did you mean "+meant+"? (what is metadata may be in an object metadata)")
	}
	return nil
}

// metadataRecord is a text and things to know about it.
func metadataRecord(object map[string]any) (*Record, error) {
	prompt, ok := object["prompt"].(string)
	if !ok || strings.TrimSpace(prompt) == "" {
		return nil, fault("prompt", lookup(object, "prompt"), "must be a text")
	}
	r := &Record{Fields: map[string]any{"prompt": prompt}}
	metadata := map[string]any{}
	for name, v := range object {
		if name != "prompt" {
			put(metadata, name, v)
		}
	}
	if len(metadata) > 0 {
		r.Fields["metadata"] = metadata
	}
	return r, nil
}

// System is before the names of prompt and negative_prompt in the metadata: what the system said there.
const System = "system_"

// verlRecord reads the columns of verl's sets: prompt and negative_prompt as messages, the answer in reward_model, and where the
// record comes from. A conversation of several turns becomes messages.
func verlRecord(object map[string]any) (*Record, error) {
	r := &Record{Fields: map[string]any{}}
	metadata := map[string]any{}
	for _, field := range []string{"prompt", "negative_prompt"} {
		v, there := object[field]
		if field == "negative_prompt" && (!there || v == nil) {
			continue
		}
		roles := []string{"user", "system"}
		if field == "prompt" {
			roles = append(roles, "assistant")
		}
		t, err := messages(field, v, there, roles...)
		if err != nil {
			return nil, err
		}
		switch {
		case t.user == "" && t.all != nil && field == "prompt":
			r.Fields["messages"] = t.all
			continue
		case field == "prompt":
			r.Messages = t.all
		}
		r.Fields[field] = t.user
		if t.system != "" {
			metadata[System+field] = t.system
		}
	}
	if prompt, _ := r.Prompt(); strings.TrimSpace(prompt) == "" && r.Fields["messages"] == nil {
		return nil, fault("prompt", prompt, "must have a user message with a text")
	}
	if err := verlAnswer(r, object); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(object)) {
		switch name {
		case "prompt", "negative_prompt", "reward_model", "extra_info":
		case "data_source", "ability":
			s, ok := object[name].(string)
			if !ok {
				return nil, fault(name, object[name], "must be a text")
			}
			metadata[name] = s
		default:
			put(metadata, name, object[name])
		}
	}
	info, ok := object["extra_info"].(map[string]any)
	if object["extra_info"] != nil && !ok {
		return nil, fault("extra_info", object["extra_info"], "must be an object")
	}
	for _, name := range slices.Sorted(maps.Keys(info)) {
		if have, twice := metadata[name]; twice && !reflect.DeepEqual(have, info[name]) {
			return nil, fault("extra_info."+name, info[name], "must come once; the record has "+show(have))
		}
		put(metadata, name, info[name])
	}
	if len(metadata) > 0 {
		r.Fields["metadata"] = metadata
	}
	return r, nil
}

// verlAnswer takes reward_model.ground_truth. A rule has nothing to compare with without
// it.
func verlAnswer(r *Record, object map[string]any) error {
	if object["reward_model"] == nil {
		return nil
	}
	model, ok := object["reward_model"].(map[string]any)
	if !ok {
		return fault("reward_model", object["reward_model"], "must be an object")
	}
	truth, there := model["ground_truth"]
	if !there || truth == nil {
		if model["style"] == "rule" {
			return fault("reward_model.ground_truth", lookup(model, "ground_truth"), `must be a text, since style is "rule"`)
		}
		return nil
	}
	var err error
	r.GroundTruth, err = answer("reward_model.ground_truth", truth)
	return err
}

// talk is what a field of messages says.
type talk struct {
	user, system string // of one message of the user, with at most one of the system
	all          []any  // where there are more than the user's; of a conversation of several turns there is nothing else
}

// messages reads a text, or messages of roles.
func messages(field string, v any, there bool, roles ...string) (t talk, err error) {
	if s, plain := v.(string); plain {
		return talk{user: s}, nil
	}
	list, ok := v.([]any)
	if !ok || len(list) == 0 {
		if !there {
			v = missing{}
		}
		return t, fault(field, v, "must be a list of messages {role, content}")
	}
	count := map[string]int{}
	for i, item := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		message, ok := item.(map[string]any)
		if !ok {
			return t, fault(at, item, "must be a message {role, content}")
		}
		content, ok := message["content"].(string)
		if !ok {
			return t, fault(at+".content", lookup(message, "content"), "must be a text")
		}
		role, _ := message["role"].(string)
		if !slices.Contains(roles, role) {
			return t, fault(at+".role", lookup(message, "role"), "must be one of "+strings.Join(roles, ", "))
		}
		if count[role]++; role == "user" {
			t.user = content
		} else if role == "system" {
			t.system = content
		}
		t.all = append(t.all, map[string]any{"role": role, "content": content})
	}
	several := count["user"] > 1 || count["assistant"] > 0
	switch last := fmt.Sprintf("%s[%d].role", field, len(list)-1); {
	case count["user"] == 0 || count["system"] > 1 || several && len(roles) < 3:
		return t, fault(field, bare(fmt.Sprintf("%d messages of the user, %d of the system", count["user"], count["system"])), "must have one message of the user and at most one of the system")
	case several && t.all[len(list)-1].(map[string]any)["role"] != "user":
		return t, fault(last, lookup(list[len(list)-1].(map[string]any), "role"), "must be user: the last message is what is answered")
	case several:
		t.user, t.system = "", ""
	case len(list) == 1:
		t.all = nil
	}
	return t, nil
}

// answer is a ground truth. Numbers are texts too: an answer may well be 42.
func answer(field string, v any) (string, error) {
	switch v := v.(type) {
	case nil:
		return "", nil
	case string:
		return v, nil
	case int64:
		return strconv.FormatInt(v, 10), nil
	}
	return "", fault(field, v, "must be a text")
}

// put adds metadata; null is no value.
func put(metadata map[string]any, name string, v any) {
	if v != nil {
		metadata[name] = v
	}
}

// lookup tells a value that is not there from null.
func lookup(object map[string]any, name string) any {
	if v, ok := object[name]; ok {
		return v
	}
	return missing{}
}
