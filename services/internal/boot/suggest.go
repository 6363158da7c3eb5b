package boot

import "strings"

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
	best := Nearest(word, names)
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// Nearest is the name that a misspelt word most likely meant; empty when none is near.
func Nearest(word string, names []string) string {
	best, distance := "", 4 // more than three edits is another word
	for _, n := range names {
		if d := edits(word, n); d < distance && 2*d <= len(word) {
			best, distance = n, d
		}
	}
	return best
}

// edits is the Levenshtein distance of two short names; long ones are far apart.
func edits(a, b string) int {
	if len(a) > 100 || len(b) > 100 {
		return 100
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := corner
			if a[i] != b[j] {
				cost++
			}
			corner = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
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
