package dataset

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// newRecord makes a record of a JSON object, by the format of the file or, if that says only JSON,
// by what the object looks like. Errors name the field.
func (d *reader) newRecord(object map[string]any) (*Record, error) {
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

// looksVerl reports whether object is a record of verl: its prompt is a list of messages. In this project a prompt
// is never a list.
func looksVerl(object map[string]any) bool {
	list, ok := object["prompt"].([]any)
	if !ok || len(list) == 0 {
		return false
	}
	message, ok := list[0].(map[string]any)
	return ok && message["role"] != nil
}

// mixedRecord makes a record of a prompt of this project; unknown fields become metadata,
// ground_truth the record's. It does not check known fields: the reader of the prompt event does. A
// misspelt field and one that metadata has too are errors.
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
		return r, nil // not a valid prompt: its reader refuses it
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
			if r.GroundTruth, err = groundTruth(name, v); err != nil {
				return nil, err
			}
			continue
		}
		if err := d.checkName(name, v); err != nil {
			return nil, err
		}
		if _, twice := metadata[name]; twice {
			return nil, fault(name, v, "must come at most once; metadata has it too")
		}
		addMetadata(metadata, name, v)
	}
	if len(metadata) > 0 {
		object["metadata"] = metadata
	}
	return r, nil
}

// checkName returns an error with the name that was probably meant if name is no field of a prompt
// but looks like one (Options.Misspelt): else a typing error would become metadata.
func (d *reader) checkName(name string, v any) error {
	if d.options.Misspelt == nil {
		return nil
	}
	if meant := d.options.Misspelt(name); meant != "" {
		return fault(name, v,
			"must be a field of a prompt, did you mean "+meant+"? (what is metadata may be in an object metadata)")
	}
	return nil
}

// metadataRecord makes a record of an object with a prompt, as Flow-GRPO's geneval files have; all
// other fields become metadata. A prompt that is missing or no text is an error.
func metadataRecord(object map[string]any) (*Record, error) {
	prompt, ok := object["prompt"].(string)
	if !ok || strings.TrimSpace(prompt) == "" {
		return nil, fault("prompt", lookup(object, "prompt"), "must be a text")
	}
	r := &Record{Fields: map[string]any{"prompt": prompt}}
	metadata := map[string]any{}
	for name, v := range object {
		if name != "prompt" {
			addMetadata(metadata, name, v)
		}
	}
	if len(metadata) > 0 {
		r.Fields["metadata"] = metadata
	}
	return r, nil
}

// System prefixes prompt and negative_prompt in the metadata: the name of the system message of each.
const System = "system_"

// verlRecord makes a record of the columns of verl's sets: prompt and negative_prompt as messages,
// the ground truth in reward_model, and metadata in the other columns. A conversation of several
// turns becomes the field messages instead of a prompt. A column of another form, and a name that
// comes twice with different values, are errors.
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
			addMetadata(metadata, name, object[name])
		}
	}
	info, ok := object["extra_info"].(map[string]any)
	if object["extra_info"] != nil && !ok {
		return nil, fault("extra_info", object["extra_info"], "must be an object")
	}
	for _, name := range slices.Sorted(maps.Keys(info)) {
		if have, twice := metadata[name]; twice && !reflect.DeepEqual(have, info[name]) {
			return nil, fault("extra_info."+name, info[name], "must come at most once; the record has "+display(have))
		}
		addMetadata(metadata, name, info[name])
	}
	if len(metadata) > 0 {
		r.Fields["metadata"] = metadata
	}
	return r, nil
}

// verlAnswer sets the ground truth of r from reward_model.ground_truth of a verl record, if there
// is one. With style "rule" it must be there; a value that is no text is an error.
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
			return fault("reward_model.ground_truth", lookup(model, "ground_truth"),
				`must be a text, since style is "rule"`)
		}
		return nil
	}
	var err error
	r.GroundTruth, err = groundTruth("reward_model.ground_truth", truth)
	return err
}

// messageTexts is the content of a field of messages.
type messageTexts struct {
	user, system string // the texts, if there is one message of the user and at most one of the system
	all          []any  // all messages, if there is more than one; a conversation of several turns sets only this
}

// messages reads the prompt or negative prompt of a verl record, value v of the field: a text, or a
// list of messages with these roles, whose last must be the user's. there is false if the object
// has no such field. Any other form is an error that names the place.
func messages(field string, v any, there bool, roles ...string) (t messageTexts, err error) {
	if s, plain := v.(string); plain {
		return messageTexts{user: s}, nil
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
		return t, fault(field, bare(fmt.Sprintf("%d messages of the user, %d of the system", count["user"],
			count["system"])), "must have one message of the user and at most one of the system")
	case several && t.all[len(list)-1].(map[string]any)["role"] != "user":
		return t, fault(last, lookup(list[len(list)-1].(map[string]any), "role"),
			"must be user: the last message is what is answered")
	case several:
		t.user, t.system = "", ""
	case len(list) == 1:
		t.all = nil
	}
	return t, nil
}

// groundTruth returns the value of a ground truth as text: whole numbers count as texts, null is
// "". Anything else is an error that names the field.
func groundTruth(field string, v any) (string, error) {
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

// addMetadata sets a name in metadata, unless v is null.
func addMetadata(metadata map[string]any, name string, v any) {
	if v != nil {
		metadata[name] = v
	}
}

// lookup returns object[name], or missing{} to tell an absent value from null.
func lookup(object map[string]any, name string) any {
	if v, ok := object[name]; ok {
		return v
	}
	return missing{}
}
