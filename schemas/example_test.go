package schemas_test

import (
	"fmt"

	"github.com/meander-rl/meander/schemas"
)

func ExampleEncode() {
	data, err := schemas.Encode(&schemas.Prompt{Prompt: "a red fox", GroupSize: new(int64(4))})
	if err != nil {
		fmt.Println(err)
		return
	}
	var p schemas.Prompt
	if err := schemas.DecodeValid(data, &p); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(p.V, p.Prompt, *p.GroupSize, p.Seed == nil)
	// Output: 1 a red fox 4 true
}

// What a user got wrong comes back by the names that the user wrote.
func ExampleDecode() {
	var p schemas.Prompt
	fmt.Println(schemas.Decode([]byte("\x81\xaagroup_size\xa18"), &p))
	fmt.Println(schemas.Decode([]byte("\x81\xa6prompt\xdb\xff\xff\xff\xff"), &p))
	// Output:
	// decode prompt/1: group_size: "8"; must be an integer
	// decode prompt/1: malformed event: length beyond the bytes left at byte 13
}

func ExamplePrompt_Validate() {
	p := schemas.Prompt{
		Prompt: "a red fox", GroupSize: new(int64(0)),
		ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEType: "foo", SDEStepIndices: []int64{2, 2}}},
	}
	fmt.Println(p.Validate())
	// Output:
	// rollout.sde_type: "foo"; must be one of sde, cps, dance_sde, ddim, ode
	// rollout.sde_step_indices[1]: 2; must come at most once
	// group_size: 0; must be between 1 and 1024
}

func ExampleMetadataFrom() {
	m, err := schemas.MetadataFrom(map[string]any{"split": "train", "index": 12})
	if err != nil {
		fmt.Println(err)
		return
	}
	fields, err := m.Map()
	fmt.Println(fields["split"], fields["index"], err)
	// Output: train 12 <nil>
}

func ExampleStep_Subject() {
	s := schemas.Step{Stage: schemas.StageMain, Run: "run-1", UID: "p17", SampleIndex: 3, Attempt: "a1", StepIndex: 9}
	fmt.Println(s.Subject())
	fmt.Println(schemas.MessageID(s.Subject()))
	// Output:
	// mdr.v1.step.run-1.p17.3.main.a1.9
	// step.run-1.p17.3.main.a1.9
}
