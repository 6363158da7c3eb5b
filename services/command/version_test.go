package command

import (
	"runtime"
	"testing"
)

func TestVersion(t *testing.T) {
	expect(t, exitOK, "meander ", "version")
	lines := linesOf(t, expect(t, exitOK, "", "version", "--json"))
	if len(lines) != 1 || lines[0]["go"] != runtime.Version() || lines[0]["subjects"] != "mdr.v1.>" {
		t.Errorf("JSON %v", lines)
	}
}
