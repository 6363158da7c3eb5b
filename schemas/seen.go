package schemas

import (
	"errors"
	"fmt"
)

// Seen asks a sampler what its network takes a stored state for: the prediction of the sample (x0) before step Step,
// decoded. It is JSON on SeenSubject(LANE); the answer is a PNG of at most 256 pixels a side, or a header
// HeaderSeenError that says why there is none. Nothing is stored.
type Seen struct {
	Run         Run   `json:"run"`
	UID         UID   `json:"uid"`
	SampleIndex int64 `json:"sample_index"`
	Step        int64 `json:"step"`
}

// HeaderSeenError says why a question has no answer.
const HeaderSeenError = "Mdr-Error"

// Validate returns all faults of the question, joined.
func (s *Seen) Validate() error {
	err := errors.Join(CheckToken("run", s.Run), CheckToken("uid", s.UID))
	if s.SampleIndex < 0 || s.SampleIndex >= MaxGroupSize || s.Step < 0 || s.Step > MaxSteps {
		err = errors.Join(err, fmt.Errorf("sample %d, step %d; must be indices", s.SampleIndex, s.Step))
	}
	return err
}
