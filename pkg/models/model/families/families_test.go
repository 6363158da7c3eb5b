package families_test

import (
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/families"
)

func TestAll_distinct(t *testing.T) {
	var names []string
	for _, f := range families.All() {
		if f.Name == "" || f.Open == nil || f.Inspect == nil {
			t.Errorf("%+v: a field is missing", f)
		}
		for _, name := range []string{f.Name, f.Class} {
			if name != "" && slices.Contains(names, name) {
				t.Errorf("two families are called %s", name)
			}
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		t.Error("no families")
	}
}
