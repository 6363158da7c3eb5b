package command

import (
	"encoding/binary"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// writeStates makes a file of tensors that are filled with their number in order.
func writeStates(t *testing.T, names []string, shape ...int) string {
	t.Helper()
	var all []safetensors.Tensor
	for i, name := range names {
		n := 1
		for _, d := range shape {
			n *= d
		}
		x, err := safetensors.FloatTensor(name, "F32", shape, slices.Repeat([]float32{float32(i)}, n))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, x)
	}
	path := filepath.Join(t.TempDir(), "states.safetensors")
	if err := safetensors.WriteFile(path, all, nil); err != nil {
		t.Fatal(err)
	}
	return path
}

// The states of a prompt are those of its group and step, as --save-latents names them, or the
// only ones there are.
func TestLoad_Start(t *testing.T) {
	whole := writeStates(t, []string{"latents.0", "latents.1", "latents.2"}, 2, 4, 3)
	groups := writeStates(t, []string{"0000-a.latents.1", "0001-b.latents.1", "latents"}, 2, 4, 3)
	for _, tt := range []struct {
		name string
		args []string
		want []float32 // the first element of the states of each prompt
		n    int64
	}{
		{"x_T", []string{"-n", "2", "--start-latents", whole, "a"}, []float32{0}, 2},
		{"a step", []string{"-n", "2", "--start-latents", whole, "--start-step", "2", "a", "b"}, []float32{2, 2}, 2},
		{"of each group", []string{"-n", "2", "--start-latents", groups, "--start-step", "1", "a", "b", "c"}, []float32{0, 1, 2}, 2},
		{"by sigma", []string{"-n", "2", "--start-latents", groups, "--start-sigma", "0.5", "a"}, []float32{2}, 2},
		{"one tensor", []string{"-n", "2", "--start-latents", writeStates(t, []string{"x"}, 2, 4, 3), "--start-sigma", "0.5", "a"}, []float32{0}, 2},
		{"one for all", []string{"-n", "2", "--start-latents", writeStates(t, []string{"x"}, 4, 3), "a"}, []float32{0}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i, p := range mustLoad(t, tt.args...) {
				states := event(t, p).Start.Latents
				if !slices.Equal(states.Shape, []int64{tt.n, 4, 3}) {
					t.Errorf("prompt %d: states of shape %v", i, states.Shape)
				}
				if x := math.Float32frombits(binary.LittleEndian.Uint32(states.Data)); x != tt.want[i] {
					t.Errorf("prompt %d: states of %v, want %v", i, x, tt.want[i])
				}
			}
		})
	}
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"no states", []string{"--start-step", "2", "a"}, "--start-latents: not given; must be there, or --branch-from, or --start-image"},
		{"no such step", []string{"--start-latents", whole, "--start-step", "3", "a"}, "--start-latents: " + whole + ` has 3 tensors, among them ["latents.0" "latents.1" "latents.2"]; must have 0000-a.latents.3 or latents.3 or latents, or one tensor alone`},
		{"step and sigma", []string{"--start-latents", whole, "--start-step", "1", "--start-sigma", "0.5", "a"}, "--start-sigma: 0.5; must be absent beside step_index"},
		{"no steps", []string{"--stop-step", "0", "a"}, "--stop-step: 0; must be between 1 and 1000"},
		{"drawn and given", []string{"-n", "2", "--start-latents", whole, "--initial-noise", "shared", "a"}, `--initial-noise: "shared"; must be absent beside start`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := loadPrompts(tt.args...); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error\n %v\nwant\n %s", err, tt.want)
			}
		})
	}
}

// A conversation in one line ends with its last answer, whatever room there is.
func TestSpoken(t *testing.T) {
	turns := []schemas.Turn{
		{},
		{Generated: true, Text: "395", Reply: "too low"},
		{},
		{Generated: true, Text: "405", Reply: "never said"},
	}
	line := conversationLine(turns)
	if line != "395 › too low › 405" {
		t.Errorf("%q", line)
	}
	if got := cutConversation(line, 8); got != "…w › 405" {
		t.Errorf("%q", got)
	}
	if got := cutConversation("a long answer", 8); got != "a long …" {
		t.Errorf("%q", got)
	}
}

func TestFailures(t *testing.T) {
	got := failureLines([]view.Member{
		{SampleResult: view.SampleResult{SampleIndex: 0, Status: "scored"}},
		{SampleResult: view.SampleResult{SampleIndex: 1, Status: "failed", Error: "no tesseract\nsecond line"}},
		{SampleResult: view.SampleResult{SampleIndex: 2, Status: "missing"}},
		{SampleResult: view.SampleResult{SampleIndex: 3, Status: "failed", Error: "no tesseract\nsecond line"}},
	})
	want := "#1 #3 failed: no tesseract ...|#2 missing|" +
		"-> End the cause, see 'meander doctor', and publish the prompt again with another uid|" +
		"-> Its reward had not come when the group closed: --deadline gives the samples of a prompt more time"
	if s := strings.Join(got, "|"); s != want {
		t.Errorf("got %s, want %s", s, want)
	}
}
