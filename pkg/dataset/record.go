package dataset

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
)

// Names of a record.
const (
	promptField   = "prompt"
	negativeField = "negative_prompt"
	metadataField = "metadata"
	truthField    = "ground_truth"
)

// System prefixes prompt and negative_prompt in the metadata: the name of the system message of each.
const System = "system_"

// unsupported are names whose values change what is asked for, in ways that no model here can follow: a record that has
// one is refused.
var unsupported = map[string]string{
	"images": noMedia, "image": noMedia, "input_image": noMedia, "input_images": noMedia,
	"videos": noMedia, "video": noMedia, "audios": noMedia,
	"audio": noMedia, "multi_modal_data": noMedia, "tools": noTools, "tools_kwargs": noTools,
	"need_tools_kwargs": noTools, "agent_name": noAgent, "interaction_kwargs": noAgent,
}

// Reasons of unsupported.
const (
	noMedia = "give a pipeline's files by its names for them, in an object conditions"
	noTools = "no model here is told of tools"
	noAgent = "--interaction names what answers a model"
)

// checkSupported refuses a value at path that no model here can follow. "single_turn_agent" is what verl does unless
// told otherwise.
func checkSupported(path, name string, v any) error {
	if why := unsupported[name]; why != "" && !isEmpty(v) && v != "single_turn_agent" {
		return fault(path+name, v, "must be absent: "+why+"; what only a reward function needs may be in an object "+
			"metadata")
	}
	return nil
}

// builder makes one record of an object.
type builder struct {
	*Reader
	record   *Record
	metadata map[string]any
}

// newRecord makes the record of a value of the file: a text, or an object, by the format of the file. Every name in it
// is taken, and noted for Columns. Errors name the field.
func (d *Reader) newRecord(value any) (*Record, error) {
	if text, ok := value.(string); ok && d.Format != Meander && d.Format != Verl {
		if strings.TrimSpace(text) == "" {
			return nil, fault("", text, "must be a text")
		}
		if d.options.PromptColumn != promptField {
			return nil, fault("", text, "must be a record with "+d.options.PromptColumn+", which --prompt-column "+
				"names; --prompts-format says if it is a table")
		}
		value = map[string]any{promptField: text}
	}
	object, ok := value.(map[string]any)
	if !ok {
		return nil, fault("", value, "must be a JSON object, or a text")
	}
	b := &builder{d, &Record{Fields: make(map[string]any, len(object))}, map[string]any{}}
	names := slices.Sorted(maps.Keys(object))
	prompt := d.promptName(names)
	if prompt == "" && (object["messages"] == nil || d.Format == Metadata || d.Format == Verl) {
		return nil, fault(d.options.PromptColumn, missing{}, "must be a text; the record has "+
			cmp.Or(strings.Join(shortNames(names), ", "), "nothing")+
			"; name the one with the prompt with --prompt-column")
	}
	if d.Format == Meander { // its reader knows every name
		if prompt != "" && prompt != promptField {
			if _, twice := object[promptField]; twice {
				return nil, fault(promptField, object[promptField],
					"must be absent where --prompt-column names another")
			}
			object[promptField] = object[prompt]
			delete(object, prompt)
		}
		for name := range object {
			d.take(name, UseField, "")
		}
		b.record.Fields = object
		return b.record, nil
	}
	if prompt != "" {
		text := object[prompt]
		if n := imagesOf(object); n > 0 {
			var err error
			if text, err = withoutImages(prompt, text, n); err != nil {
				return nil, err
			}
		}
		if err := b.addPrompt(prompt, text); err != nil {
			return nil, err
		}
	}
	for _, name := range names {
		if name == prompt || name == metadataField {
			continue
		}
		if err := b.add(name, object[name]); err != nil {
			return nil, err
		}
	}
	// Last, so that a fault of a name that comes twice names the inner one.
	if v := object[metadataField]; v != nil && prompt != metadataField {
		inner, ok := v.(map[string]any)
		if d.Format == Metadata || d.Format == Verl {
			if err := b.addMetadata("", metadataField, v); err != nil {
				return nil, err
			}
		} else if !ok {
			b.record.Fields[metadataField] = v // its reader refuses it
		} else if err := b.addAll("metadata.", inner); err != nil {
			return nil, err
		}
	}
	if len(b.metadata) > 0 && b.record.Fields[metadataField] == nil {
		b.record.Fields[metadataField] = b.metadata
	}
	return b.record, nil
}

// shortNames shortens names for errors, and their number.
func shortNames(names []string) []string {
	const most = 12
	var out []string
	for i, name := range names {
		if i == most {
			return append(out, fmt.Sprintf("%d more", len(names)-most))
		}
		out = append(out, shortPath(cmp.Or(name, `""`)))
	}
	return out
}

// add takes the value of one name beside the prompt: as a field of a prompt, ground truth or metadata.
func (b *builder) add(name string, v any) error {
	if slices.Contains(imageFields, name) && !isEmpty(v) {
		return b.addImages(name, v)
	}
	if file, ok := v.(map[string]any); ok && isBytes(file["bytes"]) { // an image of a table
		b.take(name, UseNone, "an image that is no condition")
		return nil
	}
	if err := checkSupported("", name, v); err != nil {
		return err
	}
	_, field := b.options.Fields[name]
	field = field && b.Format != Verl && name != promptField
	inner, object := v.(map[string]any)
	switch {
	case b.Format == Metadata:
	case v == nil: // as if it were absent, as an empty cell is: flags hold
		b.take(name, UseNone, "null")
		return nil
	case name == truthField:
		return b.setTruth(name, v)
	case name == "reward_model" && object:
		return b.addAnswer(inner)
	case name == "extra_info" && object:
		for _, key := range slices.Sorted(maps.Keys(inner)) {
			if err := checkSupported("extra_info.", key, inner[key]); err != nil {
				return err
			}
		}
		return b.addAll("extra_info.", inner)
	case name == "extra_info", name == "reward_model" && b.Format == Verl:
		return fault(name, v, "must be an object")
	case name == negativeField:
		return b.addNegative(v)
	case name == "messages" && field:
		list, ok := v.([]any)
		if !ok {
			break // its reader refuses it
		}
		all, err := readMessages(name, list, nil)
		if err != nil {
			return err
		}
		b.setField(name, all)
		return nil
	}
	if field && b.Format != Metadata {
		b.setField(name, whole(v, b.options.Fields[name]))
		return nil
	}
	if b.Format != Metadata && b.Format != Verl {
		if err := b.checkName(name, v); err != nil {
			return err
		}
	}
	return b.addMetadata("", name, v)
}

// imageFields are the names that data sets of edits have for the images to edit.
var imageFields = []string{"images", "image", "input_image", "input_images"}

// imagesOf counts the images that a record is given beside its prompt.
func imagesOf(object map[string]any) (n int) {
	for _, name := range imageFields {
		if list, ok := object[name].([]any); ok {
			n += len(list)
		} else if !isEmpty(object[name]) {
			n++
		}
	}
	return n
}

func isBytes(v any) bool {
	_, ok := v.([]byte)
	return ok
}

// addImages takes images beside a prompt as the condition image of a pipeline: a lane that takes none refuses it.
func (b *builder) addImages(name string, v any) error {
	if b.record.Fields["conditions"] != nil {
		return fault(name, v, "must be absent beside conditions, or other images")
	}
	b.record.Fields["conditions"] = map[string]any{"image": v}
	b.take(name, UseField, "as conditions.image")
	return nil
}

// whole returns a number with a fraction of 0 as an integer where a field needs one: tables write 7.0 for 7 in columns
// with missing values.
func whole(v any, kind Kind) any {
	if f, ok := v.(float64); ok && kind == KindInteger && f == math.Trunc(f) && math.Abs(f) < 1<<53 {
		return int64(f)
	}
	return v
}

// isEmpty reports whether a value says nothing: null, false, an empty text, list or object.
func isEmpty(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case bool:
		return !v
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		return len(v) == 0
	}
	return false
}

// setField sets a field of the prompt.
func (b *builder) setField(name string, v any) {
	b.record.Fields[name] = v
	b.take(name, UseField, "")
}

// addPrompt sets the prompt: a text, or a list of messages. A conversation of several turns becomes the field messages.
func (b *builder) addPrompt(name string, v any) error {
	if text, ok := v.(string); ok {
		if strings.TrimSpace(text) == "" && b.Format != JSON && b.Format != Parquet {
			return fault(name, v, "must be a text")
		}
		if trimmed := strings.TrimSpace(text); strings.HasPrefix(trimmed, "[{") && strings.Contains(trimmed, "role") &&
			strings.Contains(trimmed, "content") && (b.Format == CSV || b.Format == TSV) {
			return fault(name, text, "must be a text; write conversations as JSON lines or Parquet")
		}
		b.record.Fields[promptField] = text
		b.take(name, UsePrompt, "")
		return nil
	}
	if _, list := v.([]any); !list || b.Format == Metadata {
		return fault(name, v, "must be a text, or a list of messages {role, content}")
	}
	t, err := splitMessages(name, v, "user", "system", "assistant")
	if err != nil {
		return err
	}
	b.take(name, UsePrompt, "messages")
	if t.turns {
		b.record.Fields["messages"] = t.all
		return nil
	}
	if strings.TrimSpace(t.user) == "" {
		return fault(name, t.user, "must have a user message with a text")
	}
	b.record.Fields[promptField], b.record.Messages = t.user, t.all
	return b.addSystem(name, t.system)
}

// addNegative sets the negative prompt: a text, or a list of messages.
func (b *builder) addNegative(v any) error {
	if _, list := v.([]any); !list {
		b.setField(negativeField, v)
		return nil
	}
	t, err := splitMessages(negativeField, v, "user", "system")
	if err != nil {
		return err
	}
	b.setField(negativeField, t.user)
	return b.addSystem(negativeField, t.system)
}

// addSystem keeps the system message of a prompt as metadata.
func (b *builder) addSystem(name, text string) error {
	if text == "" {
		return nil
	}
	if name != negativeField {
		name = promptField
	}
	return b.addMetadata("", System+name, text)
}

// addAnswer takes reward_model of a verl record: the ground truth, which must be there with style "rule", and metadata.
func (b *builder) addAnswer(model map[string]any) error {
	const at = "reward_model." + truthField
	truth, there := model[truthField]
	if truth == nil && model["style"] == "rule" {
		if !there {
			truth = missing{}
		}
		return fault(at, truth, `must have a value, since style is "rule"`)
	}
	rest := maps.Clone(model)
	delete(rest, truthField)
	if len(rest) > 0 {
		if err := b.addMetadata("", "reward_model", rest); err != nil {
			return err
		}
	}
	if truth == nil {
		return nil
	}
	return b.setTruth(at, truth)
}

// setTruth sets the ground truth. One that is there and different is an error.
func (b *builder) setTruth(name string, v any) error {
	if have := b.record.GroundTruth; have != nil && !reflect.DeepEqual(have, v) {
		return fault(name, v, "must come at most once; the record has "+display(have))
	}
	if v == "" { // as an empty cell
		b.take(name, UseNone, "empty")
		return nil
	}
	b.record.GroundTruth = v
	b.take(name, UseTruth, "")
	return nil
}

// addAll adds the values of an object to the metadata.
func (b *builder) addAll(path string, inner map[string]any) error {
	for _, name := range slices.Sorted(maps.Keys(inner)) {
		if err := b.addMetadata(path, name, inner[name]); err != nil {
			return err
		}
	}
	return nil
}

// addMetadata sets a name in the metadata. One that is there and different is an error.
func (b *builder) addMetadata(path, name string, v any) error {
	if have, twice := b.metadata[name]; twice && !reflect.DeepEqual(have, v) {
		return fault(path+name, v, "must come at most once; the record has "+display(have))
	}
	b.metadata[name] = v
	note := ""
	if path != "" {
		note = "as " + shortPath(name)
	}
	b.take(shortPath(path+name), UseMetadata, note)
	return nil
}

// checkName returns an error with the name that was probably meant if name is no field of a prompt
// but looks like one (Options.Misspelt): else a typing error would become metadata.
func (d *Reader) checkName(name string, v any) error {
	if d.options.Misspelt == nil {
		return nil
	}
	meant, known := d.meant[name]
	if !known {
		if meant = d.options.Misspelt(name); len(d.meant) < MaxColumns {
			d.meant[name] = meant
		}
	}
	if meant != "" && (meant != promptField || d.options.PromptColumn == promptField) {
		return fault(name, v,
			"must be a field of a prompt, did you mean "+meant+"? (what is metadata may be in an object metadata)")
	}
	return nil
}

// lookup returns object[name], or missing{} to tell an absent value from null.
func lookup(object map[string]any, name string) any {
	if v, ok := object[name]; ok {
		return v
	}
	return missing{}
}
