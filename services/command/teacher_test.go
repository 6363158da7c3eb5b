package command

import (
	"bytes"
	"context"
	"strings"
	"testing"
)

// What is wrong with the command line of a teacher is said before anything is opened, by the flag.
func TestTeacher_Usage(t *testing.T) {
	for want, args := range map[string][]string{
		"--model: empty; must be a folder of a model": {},
		`--name: "a.b"`: {"--model", "sums", "--name", "a.b"},
		"--workers: -1": {"--model", "sums", "--workers", "-1"},
		`--engine: "vllm=http://x"; must be torch`: {"--model", "sums", "--engine", "vllm=http://x"},
		`--dtype: "f8"; must be auto, f32 or bf16`: {"--model", "sums", "--dtype", "f8"},
		`model "nothing": no such model`:           {"--model", "nothing"},
	} {
		var out, errs bytes.Buffer
		args := append([]string{"teacher", "--store", t.TempDir(), "--log-level", "error"}, args...)
		if status := Execute(context.Background(), args, strings.NewReader(""), &out, &errs); status != exitUsage ||
			!strings.Contains(errs.String(), want) {
			t.Errorf("%q: status %d, %s; want %q", args, status, errs.String(), want)
		}
	}
}
