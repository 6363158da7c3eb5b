package interaction

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Sums is the name of the built-in interaction that checks the answer to a sum. The sum is in the newest message of the
// user that asks one, such as 347+58=?, or the ground truth is the right number. A right answer scores 1 and ends the
// conversation. A wrong one scores 0, and the reply is "too low" or "too high". An answer that is cut off, or not a
// whole number in its usual form, gets the reply NotANumber. The model sums was trained with these replies.
const Sums = "sums"

// NotANumber is the reply of Sums to an answer that is not a whole number.
const NotANumber = "not a number"

// Builtin reports whether the interaction of a name is built in.
func Builtin(name string) bool { return name == Sums }

// Check returns an error if the interaction is built in and could not check the answers to a
// prompt: it has params, or the messages ask no sum and there is no ground truth. Intake refuses
// such a prompt with it. Workers check themselves.
func Check(name string, params map[string]string, messages []schemas.Message, groundTruth string) error {
	if !Builtin(name) {
		return nil
	}
	if len(params) > 0 {
		return fmt.Errorf("params: %d; must be none: %s has no options", len(params), name)
	}
	_, err := expectedSum(messages, groundTruth)
	return err
}

// sumsReply returns the reply of Sums to the last message of a request. A request without a sum is a Fault.
func sumsReply(r *schemas.InteractRequest) (*schemas.InteractReply, error) {
	if len(r.Messages) == 0 {
		return nil, &Fault{schemas.ConversationError, errors.New("messages: none; must end with the answer")}
	}
	last := len(r.Messages) - 1
	want, err := expectedSum(r.Messages[:last], r.GroundTruth.Text())
	if err != nil {
		return nil, &Fault{schemas.ConversationError, err}
	}
	return compareSum(r.Messages[last].Content, r.FinishReason, want), nil
}

func expectedSum(messages []schemas.Message, groundTruth string) (float64, error) {
	list := make([]scorer.Message, len(messages))
	for i, m := range messages {
		list[i] = scorer.Message(m)
	}
	return scorer.NumericTarget(scorer.UserTexts(list), groundTruth)
}

var canonical = regexp.MustCompile(`^(0|-?[1-9][0-9]*)$`)

// compareSum returns the reply of Sums to an answer: text is the answer, finish how it ended
// (schemas.FinishStop, ...), want the right number. A right answer ends the conversation with score
// 1; else the reply says too low, too high or that it is no number, with score 0.
func compareSum(text, finish string, want float64) *schemas.InteractReply {
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
