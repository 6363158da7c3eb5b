package dataset

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// mediaTags are what verl replaces by media in the text of a message.
var mediaTags = []string{"<image>", "<video>", "<audio>"}

// messageTexts is the content of a prompt of messages.
type messageTexts struct {
	user, system string // the texts, if there is one message of the user and at most one of the system
	all          []any  // all messages, if there is more than one
	turns        bool   // it is a conversation of several turns
}

// splitMessages reads value v of the field name: a list of messages with these roles, whose last must be the user's.
// Any other form is an error that names the place.
func splitMessages(field string, v any, roles ...string) (t messageTexts, err error) {
	list, ok := v.([]any)
	if !ok || len(list) == 0 {
		return t, fault(field, v, "must be a list of messages {role, content}")
	}
	if t.all, err = readMessages(field, list, roles); err != nil {
		return t, err
	}
	count := map[string]int{}
	last := ""
	for _, m := range t.all {
		message := m.(map[string]any)
		last = message["role"].(string)
		count[last]++
		switch last {
		case "user":
			t.user = message["content"].(string)
		case "system":
			t.system = message["content"].(string)
		}
	}
	t.turns = count["user"] > 1 || count["assistant"] > 0
	switch {
	case count["user"] == 0 || count["system"] > 1 || t.turns && len(roles) < 3:
		return t, fault(field, bare(fmt.Sprintf("%d messages of the user, %d of the system", count["user"],
			count["system"])), "must have one message of the user and at most one of the system")
	case t.turns && last != "user":
		return t, fault(fmt.Sprintf("%s[%d].role", field, len(list)-1), last,
			"must be user: the last message is what is answered")
	case len(list) == 1:
		t.all = nil
	}
	return t, nil
}

// readMessages returns a list of messages as {role, content}, each content a text. roles are those that may be there;
// nil: any.
func readMessages(field string, list []any, roles []string) ([]any, error) {
	out := make([]any, len(list))
	for i, item := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		message, ok := item.(map[string]any)
		if !ok {
			return nil, fault(at, item, "must be a message {role, content}")
		}
		role, ok := message["role"].(string)
		if !ok || roles != nil && !slices.Contains(roles, role) {
			return nil, fault(at+".role", lookup(message, "role"), "must be one of "+strings.Join(roles, ", "))
		}
		content, err := MessageText(at, message)
		if err != nil {
			return nil, err
		}
		out[i] = map[string]any{"role": role, "content": content}
	}
	return out, nil
}

// imagePlace is what verl replaces by the next of a record's images.
const imagePlace = "<image>"

// withoutImages returns a prompt without the places of its record's n images, tags or parts, as many as there are or
// none. A pipeline gets images beside the text, so places within a text, whose sense would be lost, are an error.
func withoutImages(field string, v any, n int) (any, error) {
	found := 0
	strip := func(at, text string) (string, error) {
		for {
			if rest, ok := strings.CutPrefix(strings.TrimSpace(text), imagePlace); ok {
				text, found = strings.TrimSpace(rest), found+1
			} else if rest, ok := strings.CutSuffix(strings.TrimSpace(text), imagePlace); ok {
				text, found = strings.TrimSpace(rest), found+1
			} else if strings.Contains(text, imagePlace) {
				return "", fault(at, text, "must have "+imagePlace+" before or after the text: a pipeline gets images "+
					"beside it, so name them in words")
			} else {
				return text, nil
			}
		}
	}
	var err error
	if text, ok := v.(string); ok {
		if v, err = strip(field, text); err != nil {
			return nil, err
		}
	}
	messages, _ := v.([]any)
	messages = slices.Clone(messages)
	for i, item := range messages {
		message, _ := item.(map[string]any)
		at := fmt.Sprintf("%s[%d].content", field, i)
		message = maps.Clone(message)
		switch content := message["content"].(type) {
		case string:
			if message["content"], err = strip(at, content); err != nil {
				return nil, err
			}
		case []any:
			parts := slices.DeleteFunc(slices.Clone(content), func(item any) bool {
				part, _ := item.(map[string]any)
				return part["type"] == "image"
			})
			found += len(content) - len(parts)
			message["content"] = parts
		default:
			continue // its reader refuses it
		}
		messages[i], v = message, messages
	}
	if found > 0 && found != n {
		return nil, fault(field, bare(fmt.Sprintf("%d places of images", found)),
			fmt.Sprintf("must be %d, one for each image of the record, or none", n))
	}
	return v, nil
}

// MessageText returns the text of a message at a place: its content, or the texts of its parts, joined. A message with
// anything else for a model, such as an image, is an error that names it.
func MessageText(at string, message map[string]any) (string, error) {
	for name, v := range message {
		if name != "role" && name != "content" && !isEmpty(v) {
			return "", fault(shortPath(at+"."+name), v, "must be absent: a message has a role and a content, and "+
				"nothing else is shown to the model")
		}
	}
	var text strings.Builder
	switch content := message["content"].(type) {
	case string:
		text.WriteString(content)
	case []any:
		for i, item := range content {
			at := fmt.Sprintf("%s.content[%d]", at, i)
			part, ok := item.(map[string]any)
			if !ok {
				return "", fault(at, item, `must be a part {"type": "text", "text"}`)
			}
			if kind := lookup(part, "type"); kind != "text" {
				return "", fault(at+".type", kind, "must be text: no model here takes other parts")
			}
			s, ok := part["text"].(string)
			if !ok {
				return "", fault(at+".text", lookup(part, "text"), "must be a text")
			}
			for name, v := range part {
				if name != "type" && name != "text" && !isEmpty(v) {
					return "", fault(shortPath(at+"."+name), v, "must be absent: of a part only the text is shown to "+
						"the model")
				}
			}
			text.WriteString(s)
		}
	default:
		return "", fault(at+".content", lookup(message, "content"), "must be a text, or a list of parts of text")
	}
	for _, tag := range mediaTags {
		if strings.Contains(text.String(), tag) {
			return "", fault(at+".content", text.String(), "must be without "+tag+": no model here takes media with a "+
				"prompt")
		}
	}
	return text.String(), nil
}
