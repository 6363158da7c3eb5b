package boot

import (
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// didYouMean suggests the known key that is nearest to an unknown one; "" if none is near.
func didYouMean(key string, fields []*field) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.path
	}
	return suggest(key, names)
}

// didYouMeanEnv is didYouMean for environment variables.
func didYouMeanEnv(variable string, fields []*field) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.env
	}
	return suggest(variable, names)
}

// suggest is the text "; did you mean NAME?" with the nearest of the names; "" if none is near.
func suggest(word string, names []string) string {
	best := schemas.Nearest(word, names)
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// isEmpty reports whether a YAML value is a section without content.
func isEmpty(raw any) bool {
	m, ok := raw.(map[string]any)
	return raw == nil || ok && len(m) == 0
}

// isSection reports whether any setting is below key.
func isSection(fields []*field, key string) bool {
	for _, f := range fields {
		if strings.HasPrefix(f.path, key+".") {
			return true
		}
	}
	return false
}
