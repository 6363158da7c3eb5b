package client_test

import (
	"reflect"
	"testing"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// A literal says what the event says with pointers: what is given, zeros of optional fields too, and nothing else.
func TestPrompt_Event(t *testing.T) {
	want := &schemas.Prompt{
		Prompt: "a red fox", GroupSize: new(int64(2)), Seed: new(int64(0)), Routing: schemas.Routing{Priority: new(int64(-1))},
		ImageSettings: schemas.ImageSettings{
			NegativePrompt: new(string), TrueCFGScale: new(4.0), Height: new(int64(512)),
			Rollout: schemas.Rollout{NoiseLevel: new(0.0), SDEStepIndices: []int64{}, SDEWindow: &schemas.SDEWindow{Size: 2, Seed: new(int64(3))}},
		},
		Reward: []schemas.RewardSpec{{Name: "ocr", Weight: new(0.0), Required: new(false)}, {Name: "jpeg"}},
		Text:   &schemas.Text{Temperature: new(0.0), TopP: new(0.9)}, Batch: &schemas.BatchSpec{ID: "b", Groups: 1, Step: new(int64(5))},
	}
	got, err := client.Prompt{
		Prompt: "a red fox", GroupSize: 2, Seed: 0, Priority: -1, NegativePrompt: "", TrueCFGScale: 4, Height: 512,
		Rollout: client.Rollout{NoiseLevel: 0.0, SDEStepIndices: []int64{}, SDEWindow: &client.SDEWindow{Size: 2, Seed: 3}},
		Reward:  []client.RewardSpec{{Name: "ocr", Weight: 0, Required: false}, {Name: "jpeg"}},
		Text:    &client.Text{Temperature: 0, TopP: 0.9}, Batch: &client.BatchSpec{ID: "b", Groups: 1, Step: new(int64(5))},
	}.Event()
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v\n%+v\n%+v", err, got, want)
	}
	if got, err := (client.Prompt{}).Event(); err != nil || !reflect.DeepEqual(got, &schemas.Prompt{}) {
		t.Errorf("of nothing %+v, %v", got, err)
	}
}

// What an optional field cannot hold is refused by its name.
func TestPrompt_EventRefuses(t *testing.T) {
	for says, p := range map[string]client.Prompt{
		"seed: 1.5; must be of type int64":                  {Seed: 1.5},
		"seed: 7; must be of type int64":                    {Seed: "7"},
		"negative_prompt: 65; must be of type string":       {NegativePrompt: 65},
		"reward[1].required: 1; must be of type bool":       {Reward: []client.RewardSpec{{}, {Required: 1}}},
		"rollout.sde_window.seed: 3; must be of type int64": {Rollout: client.Rollout{SDEWindow: &client.SDEWindow{Seed: uint8(3)}}},
	} {
		if _, err := p.Event(); err == nil || err.Error() != says {
			t.Errorf("%v; want %s", err, says)
		}
	}
}

// Each field of a prompt that a caller may set has its like in the literal.
func TestPrompt_HasEachField(t *testing.T) {
	literal := reflect.TypeFor[client.Prompt]()
	for _, f := range schemas.Fields(reflect.TypeFor[schemas.Prompt]()) {
		if _, ok := literal.FieldByName(f.GoName); !ok && f.Name != "v" && f.Name != "refill" {
			t.Errorf("Prompt has no %s", f.GoName)
		}
	}
}
