package rules

import "github.com/meander-rl/meander/schemas"

// Falls reports whether scores of groups break a rule; Above whether numbers do.
func Falls(rule string, size int, scores, rewards []float64) bool {
	w, r := New(nil, nil), &run{series: map[key]*series{}, fired: map[string]bool{}}
	for i, x := range scores {
		w.falls(r, key{rule, "f"}, size, x, rewards[i])
	}
	return len(w.found) > 0
}

func Above(rule string, limit float64, size int, numbers []float64) bool {
	w, r := New(nil, nil), &run{series: map[key]*series{}, fired: map[string]bool{}}
	r.rules = []schemas.RuleSpec{{Name: rule, Limit: &limit}}
	for _, x := range numbers {
		w.above(r, rule, "f", size, x)
	}
	return len(w.found) > 0
}
