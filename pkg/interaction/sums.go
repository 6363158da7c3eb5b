package interaction

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Sums checks the answer to a sum: 347+58=? in the newest message of the user that asks one, or the number of the ground
// truth. It scores 1 and ends the conversation where the answer is right, and else scores 0 and says too low or too high, as the
// model sums was trained with. An answer that is cut off, or no whole number as one writes it, is NotANumber.
const Sums = "sums"

// NotANumber is what Sums says to an answer that is no whole number.
const NotANumber = "not a number"

// Builtin says whether an interaction of this name is built in.
func Builtin(name string) bool { return name == Sums }

// Check refuses a built-in interaction that could say nothing to the answers of a prompt.
func Check(name string, params map[string]string, messages []schemas.Message, groundTruth string) error {
	if !Builtin(name) {
		return nil
	}
	if len(params) > 0 {
		return fmt.Errorf("params: %d; must be none: %s has no options", len(params), name)
	}
	_, err := target(messages, groundTruth)
	return err
}

func answer(r *schemas.InteractRequest) (*schemas.InteractReply, error) {
	if len(r.Messages) == 0 {
		return nil, &Fault{schemas.ConversationError, errors.New("messages: none; must end with the answer")}
	}
	last := len(r.Messages) - 1
	want, err := target(r.Messages[:last], r.GroundTruth)
	if err != nil {
		return nil, &Fault{schemas.ConversationError, err}
	}
	return sums(r.Messages[last].Content, r.FinishReason, want), nil
}

func target(messages []schemas.Message, groundTruth string) (float64, error) {
	list := make([]scorer.Message, len(messages))
	for i, m := range messages {
		list[i] = scorer.Message(m)
	}
	return scorer.NumericTarget(scorer.Asked(list), groundTruth)
}

// canonical are whole numbers as one writes them.
var canonical = regexp.MustCompile(`^(0|-?[1-9][0-9]*)$`)

func sums(text, finish string, want float64) *schemas.InteractReply {
	got, err := strconv.ParseFloat(text, 64)
	reply := &schemas.InteractReply{Score: new(0.0)}
	switch {
	case finish != schemas.FinishStop || !canonical.MatchString(text) || err != nil:
		reply.Content = NotANumber
	case got < want:
		reply.Content = "too low"
	case got > want:
		reply.Content = "too high"
	default:
		reply.Terminate, reply.Score = true, new(1.0)
	}
	return reply
}
