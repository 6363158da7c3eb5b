package schemas

import "strconv"

// Validate returns all faults of the dead letter, joined. Encode repairs over-long text, so
// only what it cannot know is a fault.
func (e *Dead) Validate() error { return CheckFields(e) }

// checkRules checks the receipt by its kind: the prompt waits, was accepted, or was refused.
func (e *Receipt) checkRules(f *faults) {
	for i, w := range e.Warnings {
		f.requireText("warnings["+strconv.Itoa(i)+"]", w)
	}
	switch {
	case e.Waiting != "":
		if e.Accepted || e.Code != "" || e.Error != "" {
			f.add("accepted", strconv.FormatBool(e.Accepted), "must be false, and code and error empty, while it waits")
		}
	case e.Accepted:
		if e.Code != "" || e.Error != "" {
			f.add("code", quote(e.Code), "must be empty, as error, when accepted")
		}
		f.checkToken("run", string(e.Run))
		f.checkToken("uid", string(e.UID))
		if e.Samples == 0 {
			f.checkWithin("samples", e.Samples, 1, MaxGroupSize)
		}
		if e.NumInferenceSteps == 0 {
			f.checkWithin("num_inference_steps", e.NumInferenceSteps, 1, MaxSteps)
		}
		f.checkIndices("sde_step_indices", e.SDEStepIndices, 0, e.NumInferenceSteps-1, MaxSteps-1)
		if e.StopStepIndex >= e.NumInferenceSteps && e.StopStepIndex < MaxSteps {
			f.checkWithin("stop_step_index", e.StopStepIndex, 0, e.NumInferenceSteps-1)
		}
		if e.StartStepIndex >= e.NumInferenceSteps && e.StartStepIndex < MaxSteps {
			f.checkWithin("start_step_index", e.StartStepIndex, 0, e.NumInferenceSteps-1)
		}
	default:
		f.requireOneOf("code", e.Code, DeadCodes)
		f.requireText("error", e.Error)
	}
}
