package recorder

import (
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// sealed are the seals of three steps, the second with a checkpoint.
type sealed struct {
	key, build, backend string
	request             schemas.Request
	parent, checkpoint  *schemas.Tensor
	contents            [3]byte
}

func (s sealed) last(t *testing.T) seal {
	t.Helper()
	maker := &Sealer{key: []byte(s.key), build: s.build}
	at, err := maker.firstSeal(&s.request, s.parent, s.backend)
	if err != nil {
		t.Fatal(err)
	}
	for i, content := range s.contents {
		step := &schemas.Step{Stage: schemas.StageMain, StepIndex: int64(i)}
		if i == 1 {
			step.Checkpoint = s.checkpoint
		}
		sums, err := schemas.SumTensors(step)
		if err != nil {
			t.Fatal(err)
		}
		at = maker.sealAfter(at, schemas.BLAKE3.Sum([]byte{content}), step, sums)
	}
	return at
}

// A seal changes with all that bits depend on, and with nothing else.
func TestSeal(t *testing.T) {
	data := []byte{1, 2, 3, 4}
	digest := schemas.BLAKE3.Text(schemas.BLAKE3.Sum(data))
	base := sealed{
		key: "key", build: "build", backend: "cpu/avx2", request: schemas.Request{Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "u"}, Sampling: schemas.Sampling{SampleSeed: 3}},
		checkpoint: &schemas.Tensor{DType: "F32", Shape: []int64{1, 1}, Data: data}, contents: [3]byte{1, 2, 3},
	}
	want := base.last(t)
	for name, c := range map[string]struct {
		change func(s *sealed)
		same   bool
	}{
		"nothing":               {func(*sealed) {}, true},
		"priority":              {func(s *sealed) { s.request.Priority = 4 }, true},
		"instructions of a CPU": {func(s *sealed) { s.backend = "cpu/avx512" }, true},
		"checkpoint in parts": {func(s *sealed) {
			s.checkpoint = &schemas.Tensor{
				DType: "F32", Shape: []int64{1, 1}, Parts: &schemas.Parts{Count: 1, Size: 4, Digest: digest},
			}
		}, true},
		"key":           {func(s *sealed) { s.key = "yek" }, false},
		"build":         {func(s *sealed) { s.build = "another" }, false},
		"device":        {func(s *sealed) { s.backend = "cuda/x" }, false},
		"kind of GPU":   {func(s *sealed) { s.backend = "cuda/y/bf16" }, false},
		"sample":        {func(s *sealed) { s.request.SampleIndex = 1 }, false},
		"run":           {func(s *sealed) { s.request.Run = "other" }, false},
		"parent":        {func(s *sealed) { s.parent = &schemas.Tensor{Data: data} }, false},
		"order":         {func(s *sealed) { s.contents = [3]byte{2, 1, 3} }, false},
		"first content": {func(s *sealed) { s.contents[0] = 9 }, false},
		"no checkpoint": {func(s *sealed) { s.checkpoint = nil }, false},
		"other checkpoint": {func(s *sealed) {
			s.checkpoint = &schemas.Tensor{DType: "F32", Shape: []int64{1, 1}, Data: []byte{1, 2, 3, 5}}
		}, false},
		"its shape": {func(s *sealed) { s.checkpoint = &schemas.Tensor{DType: "F32", Shape: []int64{1}, Data: data} }, false},
	} {
		s := base
		c.change(&s)
		if got := s.last(t); (got == want) != c.same {
			t.Errorf("%s: the seal is the same: %v, want %v", name, got == want, c.same)
		}
	}
}

// The program is named by what it is.
func TestProgram(t *testing.T) {
	if a := program(); len(a) != 64 || a != program() {
		t.Errorf("program %q; want a SHA-256", a)
	}
}
