package verify

import (
	"context"
	"reflect"
	"slices"

	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
)

// checkConversation checks the turns between the model's answers. The tokens that were given must be the stored reply
// in the model's template. A built-in interaction is asked again: its reply, its score, and whether it ends the
// conversation must be those that are stored.
func (x *textSample) checkConversation(ctx context.Context) {
	of := x.t.Text
	for i := 1; i+1 < len(of.Turns); i += 2 {
		answer, given := of.Turns[i], of.Turns[i+1]
		part := schemas.TextResult{Settings: of.Settings, Turns: of.Turns[:i+1]}
		want, err := texts.ReplyIDs(x.version.text, &part, x.ids[:answer.End])
		if err != nil {
			x.fault(-1, "turns[%d].reply: %v", i, err)
		} else if !slices.Equal(want, x.ids[given.Begin:given.End]) {
			x.fault(-1, "turns[%d]: the tokens that were given are not turns[%d].reply in the model's template", i+1, i)
		}
	}
	if of.Settings.Interaction == nil || !interaction.Builtin(of.Settings.Interaction.Name) {
		return
	}
	for i := 1; i < len(of.Turns); i += 2 {
		part := schemas.TextResult{Settings: of.Settings, Turns: of.Turns[:i+1]}
		turn := of.Turns[i]
		got, err := interaction.Ask(ctx, nil, &schemas.InteractRequest{
			Name: of.Settings.Interaction.Name, Messages: append(part.Messages(),
				schemas.Message{Role: schemas.RoleAssistant, Content: turn.Text}), FinishReason: turn.FinishReason,
			GroundTruth: x.t.Group.GroundTruth(),
		}, 0)
		if err != nil {
			x.fault(-1, "turns[%d].reply: %v", i, err)
			continue
		}
		ended := i == len(of.Turns)-1 && of.Conversation == schemas.ConversationTerminated
		if got.Terminate != ended || got.Content != turn.Reply || !reflect.DeepEqual(got.Score, turn.Score) ||
			len(turn.Metadata) > 0 {
			x.fault(-1, "turns[%d].reply: %q; %s says %q now", i, turn.Reply, of.Settings.Interaction.Name, got.Content)
		}
	}
}
