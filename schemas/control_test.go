package schemas_test

import "github.com/meander-rl/meander/schemas"

func controlSamples() []sample {
	return []sample{
		{"control-cancel", &schemas.Control{
			Run: "run-1", Action: "cancel", UID: "p17", By: "ada@lab", Reason: "a typo in the prompt", At: 1_763_690_400_000_000_000,
		}},
		{"control-paused", &schemas.Control{
			Run: "run-1", Action: "pause", By: "ada@lab", At: 1_763_690_400_000_000_000, Seq: 17, Stored: 1_763_690_400_000_001_000,
		}},
		{"control_receipt", &schemas.ControlReceipt{
			Accepted: true, Run: "run-1", Seq: 17, Requests: 5, Status: &schemas.RunStatus{
				State: "paused", Groups: 4, Closed: 1, Cancelled: 1, Trajectories: 17, Rewards: 16, Waiting: 2, Parked: 5,
				By: "ada@lab", Since: 1_763_690_400_000_001_000,
			},
		}},
		{"control_receipt-midway", &schemas.ControlReceipt{
			Run: "run-1", Seq: 19, Accepted: true, Status: &schemas.RunStatus{
				State: "running", WaitsFor: "a sampler", Groups: 3, Closed: 1, OpenBatches: 1, Trajectories: 8, Rewards: 6,
				Outcomes: []schemas.OutcomeCount{{Outcome: "open", Groups: 2}, {Outcome: "partial", Groups: 1}},
				Failed:   2, Waiting: 8, Midway: 3, SavedEvaluations: 12, Refused: 1, Lost: 1,
			},
		}},
		{"control_receipt-refused", &schemas.ControlReceipt{Run: "run-1", UID: "p99", Seq: 18, Code: "invalid", Error: "uid: p99; must be one of run run-1: p1 p2"}},
		{"control-prune", &schemas.Control{
			Run: "run-1", Action: "prune", UID: "p17", SampleIndex: new(int64(3)), StepIndex: 6, By: "trainer", At: 1_763_690_400_000_000_000,
		}},
		{"prompt-prune", &schemas.Prompt{Prompt: "x", ImageSettings: schemas.ImageSettings{Prune: &schemas.Prune{StepIndex: 5, LogProbBelow: new(-1.5), LogProbAbove: new(2.0)}}}},
		{"presence-obeys", &schemas.Presence{Service: "sampler", Instance: "sampler-k3", Lane: "tiny", Controls: 17, At: 1_763_690_400_000_000_000}},
	}
}
