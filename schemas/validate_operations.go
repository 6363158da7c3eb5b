package schemas

import (
	"encoding/json"
	"strconv"
)

// Validate joins every fault of the policy. That the scheduler configuration makes
// sense is for the services that use it; here it must be a JSON object.
func (e *Policy) Validate() error {
	var f faults
	f.version(e.V)
	f.token("lane", e.Lane)
	f.text("model", e.Model, 1, MaxName)
	f.text("family", e.Family, 0, MaxName)
	f.notNegative("policy_version", e.PolicyVersion)
	f.text("weights_digest", e.WeightsDigest, 0, MaxName)
	if f.length("scheduler_config", len(e.SchedulerConfig), 0, MaxSchedulerConfig) && len(e.SchedulerConfig) > 0 {
		var object map[string]json.RawMessage
		if json.Unmarshal(e.SchedulerConfig, &object) != nil || object == nil {
			f.add("scheduler_config", strconv.Itoa(len(e.SchedulerConfig))+" bytes", "must be a JSON object")
		}
	}
	f.within("latent_channels", e.LatentChannels, 1, MaxLatentChannels)
	f.within("pixels_per_token", e.PixelsPerToken, 1, MaxPixelsPerToken)
	f.within("height", e.Height, 1, MaxSide)
	f.within("width", e.Width, 1, MaxSide)
	f.within("num_inference_steps", e.NumInferenceSteps, 1, MaxSteps)
	f.number("true_cfg_scale", e.TrueCFGScale, 0, MaxCFGScale)
	f.within("max_pixels", e.MaxPixels, 1, MaxSide*MaxSide)
	f.notNegative("announced", e.Announced)
	if f.length("reward", len(e.Reward), 0, MaxRewards) {
		for i, name := range e.Reward {
			f.rewardName("reward["+strconv.Itoa(i)+"]", name)
		}
	}
	return f.err()
}

// Validate joins every fault of the dead letter. Encode repairs over-long text, so
// only what it cannot know is a fault.
func (e *Dead) Validate() error {
	var f faults
	f.version(e.V)
	f.enum("stage", e.Stage, Stages)
	f.enum("code", e.Code, DeadCodes)
	f.text("reason", e.Reason, 1, MaxText)
	f.text("run", e.Run, 0, MaxToken)
	f.text("uid", e.UID, 0, MaxToken)
	f.text("subject", e.OriginalSubject, 0, MaxSubject)
	f.text("stream", e.Stream, 0, MaxName)
	if f.length("headers", len(e.Headers), 0, MaxHeaders) {
		for i, h := range e.Headers {
			g := f.item("headers", i)
			g.text("name", h.Name, 1, MaxHeaderName)
			g.text("value", h.Value, 0, MaxHeaderValue)
		}
	}
	f.length("data", len(e.Data), 0, MaxEventBytes)
	f.notNegative("at", e.At)
	return f.err()
}

// Validate joins every fault of the receipt.
func (e *Receipt) Validate() error {
	var f faults
	f.version(e.V)
	f.text("run", e.Run, 0, MaxToken)
	f.text("uid", e.UID, 0, MaxToken)
	if f.length("warnings", len(e.Warnings), 0, maxFaults) {
		for i, w := range e.Warnings {
			f.text("warnings["+strconv.Itoa(i)+"]", w, 1, MaxText)
		}
	}
	if e.Waiting != "" {
		f.text("waiting", e.Waiting, 1, MaxText)
		if e.Accepted || e.Code != "" || e.Error != "" {
			f.add("accepted", strconv.FormatBool(e.Accepted), "must be false, and code and error empty, while it waits")
		}
		return f.err()
	}
	if e.Accepted {
		if e.Code != "" || e.Error != "" {
			f.add("code", quote(e.Code), "must be empty, as error, when accepted")
		}
		f.token("run", e.Run)
		f.token("uid", e.UID)
		f.within("samples", e.Samples, 1, MaxGroupSize)
		f.within("num_inference_steps", e.NumInferenceSteps, 1, MaxSteps)
		f.indices("sde_step_indices", e.SDEStepIndices, e.NumInferenceSteps-1)
		return f.err()
	}
	f.enum("code", e.Code, DeadCodes)
	f.text("error", e.Error, 1, MaxText)
	f.within("samples", e.Samples, 0, MaxGroupSize)
	f.within("num_inference_steps", e.NumInferenceSteps, 0, MaxSteps)
	f.indices("sde_step_indices", e.SDEStepIndices, MaxSteps-1)
	return f.err()
}
