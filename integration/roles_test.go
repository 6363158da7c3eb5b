package integration_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
)

// The document has the roles as the code has them.
func TestRoles_Document(t *testing.T) {
	var table strings.Builder
	table.WriteString("| role | publishes | takes its work from | reads | writes to | removes of |\n|---|---|---|---|---|---|\n")
	for _, g := range bus.Grants() {
		if g.Unlimited {
			fmt.Fprintf(&table, "| `%s`: %s | everything | | | | |\n", g.Role, g.Purpose)
			continue
		}
		removes := slices.Concat(g.Deletes, g.Purges)
		slices.Sort(removes)
		fmt.Fprintf(&table, "| `%s`: %s | %s | %s | %s | %s | %s |\n", g.Role, g.Purpose, code(g.Publishes),
			code(slices.Sorted(maps.Keys(g.Takes))), code(g.Reads), code(g.Puts), code(slices.Compact(removes)))
	}
	inDocument(t, "deploy/secure.md", "roles", table.String())
}

// code sets names as code.
func code(names []string) string {
	var out []string
	for _, n := range names {
		out = append(out, "`"+n+"`")
	}
	return strings.Join(out, " ")
}
