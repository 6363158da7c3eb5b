package schemas_test

import (
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// A stored policy is of the lane of the policy that it was made of, whatever its weights; another setting of the model
// is another lane's.
func TestPolicy_SameLane(t *testing.T) {
	mine := schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "signs", Model: "signs", BaseDigest: "b", WeightsDigest: "w", SchedulerConfig: []byte("{}"), Reward: []string{},
		Text: &schemas.TextPolicy{Vocabulary: 16, MaxTokens: 64, TopP: 1},
	}
	pushed := mine
	pushed.PolicyVersion, pushed.WeightsDigest, pushed.By, pushed.Announced = 3, "other", "trainer", 1
	data, err := schemas.Encode(&pushed)
	if err != nil {
		t.Fatal(err)
	}
	var stored schemas.Policy
	if err := schemas.Decode(data, &stored); err != nil {
		t.Fatal(err)
	}
	if !stored.SameLane(&mine) || !mine.SameLane(&stored) {
		t.Error("a stored policy is not of its own lane")
	}
	stored.Text.MaxTokens++
	if stored.SameLane(&mine) {
		t.Error("another context is the same lane")
	}
}
