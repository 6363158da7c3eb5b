package integration_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	commands "github.com/meander-rl/meander/services/command"
)

// Stages that no sample can be made of are refused by name: when a prompt is published, where it becomes a dead letter,
// and before, by a dry run. What a stage lacks when it runs is in TestStages_Failed; what a trainer may not read, in
// tests/test_stages.py of the Python client.
func TestStages_Refused(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	c.publish(t, "first", thinkAndPaint("g", 2)) // both lanes are there
	const paint0 = `{"name": "paint", "model": "synthetic"}`
	const think, paint = `{"name": "think", "model": "sums"}`, `{"name": "paint", "model": "synthetic", "prompt": "says {think.text}"}`
	for i, x := range []struct{ name, more, stages, want string }{
		{"a stage that is not there", "", think + `, {"name": "paint", "model": "synthetic", "prompt": "{thnk.text}"}`, "stages[1].prompt: {thnk.text}: not known; must be prompt, metadata.KEY or STAGE.text with one of the stages think, paint"},
		{"an entry that is not there", "", `{"name": "think", "model": "sums", "prompt": "{metadata.sum}"}`, "stages[0].prompt: {metadata.sum}: the prompt's metadata has no such entry"},
		{"a text of a painter", "", think + ", " + paint + `, {"name": "again", "model": "sums", "prompt": "{paint.text}"}`, "stages[2].prompt: {paint.text}: paint makes images, and no text"},
		{"a cycle of one", "", `{"name": "think", "model": "sums", "prompt": "{think.text}"}`, "stages[0].prompt: {think.text}: think comes later; must be an earlier stage"},
		{"a cycle of two", "", paint + ", " + think, "stages[0].prompt: {think.text}: think comes later; must be an earlier stage"},
		{"an image of itself", `"rounds": 2`, think + `, {"name": "paint", "model": "synthetic", "conditions": [{"name": "image", "stage": "paint"}]}`, `stages[1].conditions[0].stage: "paint"; must be an earlier stage`},
		{"a lane that there is not", "", think + `, {"name": "paint", "model": "sings"}`, `stages[1]: model: "sings" is not served here; must be one of sums, synthetic`},
		{"a lane that takes no images", "", think + ", " + paint + `, {"name": "again", "model": "synthetic", "conditions": [{"name": "image", "stage": "paint"}]}`, "stages[2]: conditions: image; must be absent"},
		{"a text that is given an image", "", paint0 + `, {"name": "again", "model": "sums", "conditions": [{"name": "image", "stage": "paint"}]}`, "stages[1].conditions: given; must be absent: the stage makes a text, and takes no files"},
		{"a video of an image", `"reward": [{"name": "jpeg_compressibility"}]`, paint0 + `, {"name": "judge", "interaction": {"name": "critic"}, "conditions": [{"name": "v", "type": "video", "stage": "paint"}]}`, `stages[1].conditions: v: type: "video"; stage paint makes none`},
		{"an entry that a substitute lacks", `"metadata": {"c": "red"}, "group_policy": {"failed": "refill"}, "substitutes": [{"prompt": "1+1=?"}]`, `{"name": "think", "model": "sums", "prompt": "{metadata.c}"}`, "substitutes[0]: stages[0].prompt: {metadata.c}: the prompt's metadata has no such entry"},
		{"more children than a group may have", "", think + `, {"name": "paint", "model": "synthetic", "children": 1025}`, "stages[1].children: 1025; must be between 1 and 1024"},
		{"more children than the group has", `"group_size": 4`, think + `, {"name": "paint", "model": "synthetic", "children": 3}`, "group_size: 4; must be a multiple of 3, the children of all stages"},
		{"more samples than a group may have", `"group_size": 1024, "rounds": 8`, think, "group_size: 1024; must be at most 512 with 1 stages in 8 rounds"},
		{"no stages", "", "", "stages: 0 items; must be at least 1"},
		{"two stages of a name", "", think + ", " + think, `stages[1].name: "think"; must come at most once`},
		{"a reward of a stage", "", `{"name": "think", "model": "sums", "reward": [{"name": "confidence"}]}`, "stages[0].reward: unknown field; the prompt has it: each reward there may name its stage"},
		{"a reward of a stage that is not there", `"reward": [{"name": "confidence", "stage": "thnk"}]`, think, `reward[0].stage: "thnk"; must be one of think`},
		{"a reward of the other kind", `"reward": [{"name": "confidence", "stage": "paint"}]`, think + ", " + paint, `reward[0]: name: "confidence"; rates texts, and the model makes images`},
		{"a leaf of a tree", "", `{"name": "paint", "model": "synthetic", "tree": {"branches": [{"step_index": 1, "width": 2}], "leaf": 1}}`, "stages[0].tree.leaf: given; must be absent in a stage, whose samples are all leaves"},
		{"a tree in rounds", `"rounds": 2`, `{"name": "paint", "model": "synthetic", "tree": {"branches": [{"step_index": 1, "width": 2}]}}`, "stages[0].tree: 2; must be absent beside rounds"},
		{"a tree of texts", `"reward": [{"name": "confidence"}]`, `{"name": "think", "model": "sums", "tree": {"branches": [{"step_index": 1, "width": 2}]}}`, "stages[0]: tree: given; must be absent"},
		{"a branch point that no noise parts", "", `{"name": "paint", "model": "synthetic", "rollout": {"sde_step_indices": [0]}, "tree": {"branches": [{"step_index": 1, "width": 2}]}}`, "stages[0]: tree.branches[0].step_index: 1; must be a stochastic step"},
		{"a state that is not stored", "", `{"name": "paint", "model": "synthetic", "start": {"branch": {"uid": "none", "sample_index": 0, "step_index": 1}}}`, "stages[0]: start.branch: sample 0 of group none of run r: not found; must be a sample that was completed and is still stored"},
		{"a stop without an image", "", `{"name": "paint", "model": "synthetic", "stop": {"step_index": 2}}`, "stages[0].stop.decode: false; must be true in a stage"},
		{"scheduled sampling", "", `{"name": "paint", "model": "synthetic", "scheduled_sampling": {}}`, "stages[0].scheduled_sampling: given; must be absent in a stage, which makes an output"},
		{"credit of a frozen stage", `"reward": [{"name": "confidence"}]`, `{"name": "think", "model": "sums", "frozen": true, "credit": [{"reward": "confidence", "weight": 1}]}`, "stages[0].credit: given; must be absent beside frozen"},
	} {
		t.Run(x.name, func(t *testing.T) {
			more := ""
			if x.more != "" {
				more = x.more + ", "
			}
			file := filepath.Join(t.TempDir(), "p.jsonl")
			uid := schemas.UID(fmt.Sprint("g", i))
			line := fmt.Sprintf(`{"v": 1, "uid": %q, "prompt": "12+30=?", %s"stages": [%s]}`, uid, more, x.stages)
			if err := os.WriteFile(file, []byte(line), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{{"publish", "--dry-run"}, {"publish"}} {
				var out, errs bytes.Buffer
				args = append(args, "--nats", c.Server.ClientURL(), "--run", "r", "--prompts", file)
				code := commands.Execute(t.Context(), args, nil, &out, &errs)
				// What a running pipeline lacks may come until the prompt is published.
				may := args[1] == "--dry-run" &&
					(strings.Contains(x.want, "not served here") || strings.Contains(x.want, "still stored"))
				if said := out.String() + errs.String(); code == 0 && !may || !strings.Contains(said, x.want) {
					t.Errorf("%v ends with %d, and says %s; want %q", args, code, said, x.want)
				}
			}
			if _, err := c.JetStream().Publish(t.Context(), schemas.PromptSubject("r"), []byte(line)); err != nil {
				t.Fatal(err)
			}
			subject := schemas.DeadSubject(schemas.ServiceIntake, "r", uid)
			m := bustest.Await(t, c.Bus, 1, schemas.StreamDead, subject)[subject]
			if d := bustest.Decode[schemas.Dead](t, m); !strings.Contains(d.Reason, x.want) {
				t.Errorf("dead letter: %s; want %s", d.Reason, x.want)
			}
		})
	}
}
