package command

import (
	"os"
	"path/filepath"
	"testing"
)

// Python does it: its arguments, output and exit status are those of the command. A Python without the package is said.
func TestCertify(t *testing.T) {
	python := filepath.Join(t.TempDir(), "python")
	t.Setenv("MEANDER_PYTHON", python)
	for program, want := range map[string]struct {
		status int
		text   string
	}{
		"#!/bin/sh\nshift 2\necho \"$@\"\nexit 1\n": {exitFailed, "meander.certify trainer a.py:f --dtype float32"},
		"#!/bin/sh\nexit 0\n":                       {exitOK, ""},
		"#!/bin/sh\nexit 78\n":                      {exitUsage, "has no module meander; pip install meander-rl"},
	} {
		if err := os.WriteFile(python, []byte(program), 0o700); err != nil {
			t.Fatal(err)
		}
		expect(t, want.status, want.text, "certify", "trainer", "a.py:f", "--dtype", "float32")
	}
	expect(t, exitOK, "meander certify engine lane=DIR", "certify", "--help")
}
