package stages

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// fill replaces each place of a template, {NAME}, by its value. {{ and }} are braces. An error is that of a value, says
// where a brace stands alone, or that the text is longer than most bytes.
func fill(template string, most int, value func(place string) (string, error)) (string, error) {
	var out strings.Builder
	for rest := template; ; {
		if n := out.Len(); n > most { // the rest is not built: a short template may name a long text a thousand times
			return "", fmt.Errorf("filled, %d bytes and more; must be at most %d", n, most)
		}
		i := strings.IndexAny(rest, "{}")
		if i < 0 {
			out.WriteString(rest)
			return out.String(), nil
		}
		out.WriteString(rest[:i])
		if strings.HasPrefix(rest[i:], "{{") || strings.HasPrefix(rest[i:], "}}") {
			out.WriteByte(rest[i])
			rest = rest[i+2:]
			continue
		}
		place, after, closed := strings.Cut(rest[i+1:], "}")
		if rest[i] == '}' || !closed || strings.ContainsAny(place, "{\n") {
			return "", fmt.Errorf("a brace alone at byte %d; must be a place, such as {prompt}, or doubled",
				len(template)-len(rest)+i)
		}
		text, err := value(place)
		if err != nil {
			return "", fmt.Errorf("{%s}: %w", place, err)
		}
		out.WriteString(text)
		rest = after
	}
}

// metadataText returns an entry of metadata as a template has it: a text as it is, all others as JSON.
func metadataText(metadata schemas.Metadata, key string) (string, error) {
	m, err := metadata.Map()
	if err != nil {
		return "", err
	}
	switch v := m[key].(type) {
	case nil:
		return "", errors.New("the prompt's metadata has no such entry")
	case string:
		return v, nil
	default:
		text, err := json.Marshal(v)
		return string(text), err
	}
}

// templatesOf returns the templates of a stage with the names of their fields.
func templatesOf(s *schemas.StageSpec) (list [][2]string) {
	q := s.AsPrompt()
	list = append(list, [2]string{"prompt", q.Prompt}, [2]string{"prompt_2", q.Prompt2},
		[2]string{"prompt_3", q.Prompt3})
	if q.NegativePrompt != nil {
		list = append(list, [2]string{"negative_prompt", *q.NegativePrompt})
	}
	for i, m := range q.Messages {
		list = append(list, [2]string{fmt.Sprintf("messages[%d].content", i), m.Content})
	}
	return list
}

// Check returns the faults of what the stages of a prompt refer to, joined: an entry of the metadata or a stage that is
// not there, one that comes later, or one that makes something else. Those of its substitutes are faults too. kinds are
// those of the stages, in order, "" where they are not known; nil: none is. The prompt has passed Validate.
func Check(p *schemas.Prompt, kinds []string) error {
	errs := []error{check(p, kinds)}
	for k := 0; errs[0] == nil && k < len(p.Substitutes); k++ {
		q := *p
		q.Substitute(int64(k + 1))
		if err := check(&q, kinds); err != nil {
			errs = append(errs, fmt.Errorf("substitutes[%d]: %w", k, err))
		}
	}
	return errors.Join(errs...)
}

// check is Check of the prompt alone, without its substitutes.
func check(p *schemas.Prompt, kinds []string) error {
	if kinds == nil {
		kinds = make([]string, len(p.Stages))
	}
	var errs []error
	for i := range p.Stages {
		s := &p.Stages[i]
		add := func(field string, err error) {
			if err != nil {
				errs = append(errs, fmt.Errorf("stages[%d].%s: %w", i, field, err))
			}
		}
		for _, t := range templatesOf(s) {
			most := schemas.MaxPromptBytes
			if s.Interaction != nil || strings.HasPrefix(t[0], "messages") {
				most = schemas.MaxAnswerBytes
			}
			_, err := fill(t[1], most, func(place string) (string, error) { return knownText(p, kinds, i, place) })
			add(t[0], err)
		}
		if len(s.Conditions) > 0 && kinds[i] == schemas.StageText {
			add("conditions", errors.New("given; must be absent: the stage makes a text, and takes no files"))
			continue
		}
		for k, c := range s.Conditions {
			if c.Stage == "" {
				continue
			}
			at, field := indexOf(p, c.Stage), fmt.Sprintf("conditions[%d].stage", k)
			switch {
			case at >= i:
				add(field, fmt.Errorf("%q; must be an earlier stage", c.Stage))
			case at >= 0 && kinds[at] != "" && kinds[at] != schemas.KindImage:
				add(field, fmt.Errorf("%q; must be a stage that makes images, and this one makes %s", c.Stage,
					kinds[at]))
			}
		}
	}
	return errors.Join(errs...)
}

func indexOf(p *schemas.Prompt, name schemas.Stage) int {
	return slices.IndexFunc(p.Stages, func(s schemas.StageSpec) bool { return s.Name == name })
}

// knownText returns what the prompt itself has for a place in the templates of its stage i: nothing for the text of a
// stage. An error says that the stage may not have the place.
func knownText(p *schemas.Prompt, kinds []string, i int, place string) (string, error) {
	of, what, dotted := strings.Cut(place, ".")
	switch {
	case place == "prompt":
		return p.Prompt, nil
	case of == "metadata" && dotted:
		return metadataText(p.Metadata, what)
	}
	at := indexOf(p, schemas.Stage(of))
	names := make([]string, len(p.Stages))
	for k, s := range p.Stages {
		names[k] = string(s.Name)
	}
	switch {
	case !dotted || at < 0:
		return "", fmt.Errorf("not known; must be prompt, metadata.KEY or STAGE.text with one of the stages %s",
			strings.Join(names, ", "))
	case what == "image":
		return "", fmt.Errorf("no text; give the image to a condition: {\"name\": \"image\", \"stage\": %q}", of)
	case what != "text":
		return "", fmt.Errorf("%s has no %q; must be %s.text", of, what, of)
	case kinds[at] == schemas.KindImage:
		return "", fmt.Errorf("%s makes images, and no text", of)
	case at >= i && p.MostRounds() == 1:
		return "", fmt.Errorf("%s comes later; must be an earlier stage, or rounds above 1, in the first of which its "+
			"text is empty", of)
	}
	return "", nil
}
