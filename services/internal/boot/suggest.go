package boot

import (
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// didYouMean names the known key nearest to an unknown one, if it is near.
func didYouMean(key string, fields []*field) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.path
	}
	return hint(key, names)
}

func didYouMeanEnv(variable string, fields []*field) string {
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.env
	}
	return hint(variable, names)
}

func hint(word string, names []string) string {
	best := schemas.Nearest(word, names)
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// empty says whether a YAML value is a section without content.
func empty(raw any) bool {
	m, ok := raw.(map[string]any)
	return raw == nil || ok && len(m) == 0
}

func isSection(fields []*field, key string) bool {
	for _, f := range fields {
		if strings.HasPrefix(f.path, key+".") {
			return true
		}
	}
	return false
}
