package command

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rs/zerolog"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
)

const examples = "../../pkg/dataset/testdata/"

// loadPrompts reads prompts as a command line with these arguments would.
func loadPrompts(args ...string) ([]prompt, *promptFlags, error) {
	p := &promptFlags{}
	f := pflag.NewFlagSet("test", pflag.ContinueOnError)
	p.addFlags(f)
	if err := f.Parse(args); err != nil {
		return nil, p, usage(fields.FlagError(err, f, flagNames))
	}
	prompts, err := p.load(f.Args(), strings.NewReader("from stdin\n"), true)
	return prompts, p, err
}

func mustLoad(t *testing.T, args ...string) []prompt {
	t.Helper()
	prompts, _, err := loadPrompts(args...)
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	return prompts
}

// Prompts of a file come while it is read: a dry run holds few of them, joined to batches of a size or not.
func TestEach_Streams(t *testing.T) {
	for _, args := range [][]string{{"--prompts=-"}, {"--prompts=-", "--batch-size=64"}} {
		p := &promptFlags{}
		f := pflag.NewFlagSet("test", pflag.ContinueOnError)
		p.addFlags(f)
		if err := f.Parse(args); err != nil {
			t.Fatal(err)
		}
		in := strings.NewReader(strings.Repeat("a red sign\n", 1<<18))
		for q, err := range p.each(nil, in, true) {
			if err != nil || q.uid != "0000-a-red-sign" || in.Len() < 1<<20 {
				t.Errorf("%q: %v, %v; %d bytes are left", args, q, err, in.Len())
			}
			break
		}
	}
}

// uidsOf lists the uids in order.
func uidsOf(prompts []prompt) []string {
	out := make([]string, len(prompts))
	for i, p := range prompts {
		out[i] = string(p.uid)
	}
	return out
}

// event is a prompt as intake reads it.
func event(t *testing.T, p prompt) *schemas.Prompt {
	t.Helper()
	data, err := p.encode()
	if err != nil {
		t.Fatal(err)
	}
	var e schemas.Prompt
	if err := schemas.Decode(data, &e); err != nil {
		t.Fatalf("%s: %v", p.uid, err)
	}
	if err := e.Validate(); err != nil {
		t.Fatalf("%s: %v", p.uid, err)
	}
	return &e
}

// Every format becomes valid prompts, with the answers where scorers look for them.
func TestLoad_Formats(t *testing.T) {
	for _, tt := range []struct {
		file string
		args []string
		uids []string
		// first prompt
		text, negative, truth string
		metadata              string
	}{
		{file: "ocr.txt", uids: []string{"0000-a-neon-sign-above-a-diner", "0001-a-chalkboard-in-a-cafe-with", "0002-une-affiche-o-est-crit-d", "0003-a-neon-sign-above-a-diner"}, text: `A neon sign above a diner that says "OPEN 24 HOURS"`},
		{file: "prompts.jsonl", uids: []string{"first", "0001-a-red-sign", "0002-a-green-sign-that-says-exit"}, text: `a blue sign that says "4071"`},
		{file: "prompts.json", uids: []string{"0000-a-blue-sign-that-says-4071", "0001-a-red-sign-that-says-open", "0002-a-green-sign"}, text: `a blue sign that says "4071"`},
		{
			file: "verl-ocr.jsonl", uids: []string{"0000-a-shop-window-with-sale-50", "0001-a-door-plate-reading-42"},
			text: `A shop window with "SALE 50%" painted on the glass`, negative: " ", truth: "SALE 50%", metadata: "flow_grpo/ocr",
		},
		{file: "geneval.jsonl", uids: []string{"0000-a-photo-of-a-bench-and", "0001-a-photo-of-three-birds", "0002-a-photo-of-a-dog-left"}, text: "a photo of a bench and a clock", metadata: "two_object"},
		{file: "prompts.csv", uids: []string{"blue-one", "0001-two-lines-one-prompt", "0002-a-red-sign"}, text: `a sign that says "4071"`, truth: "4071", metadata: "blue"},
	} {
		t.Run(tt.file, func(t *testing.T) {
			prompts := mustLoad(t, append(tt.args, "--prompts", examples+tt.file, "--reward",
				"http:judge,jpeg_compressibility")...)
			if got := uidsOf(prompts); !slices.Equal(got, tt.uids) {
				t.Errorf("uids %q, want %q", got, tt.uids)
			}
			for _, p := range prompts {
				event(t, p)
			}
			e := event(t, prompts[0])
			negative := ""
			if e.NegativePrompt != nil {
				negative = *e.NegativePrompt
			}
			if e.Prompt != tt.text || negative != tt.negative {
				t.Errorf("prompt %q without %q, want %q without %q", e.Prompt, negative, tt.text, tt.negative)
			}
			if e.Reward[0].GroundTruth.Text() != tt.truth || e.Reward[1].GroundTruth != "" {
				t.Errorf("ground truths %q and %q; want %q, and none where nothing is compared",
					e.Reward[0].GroundTruth, e.Reward[1].GroundTruth, tt.truth)
			}
			if !bytes.Contains(e.Metadata, []byte(tt.metadata)) {
				t.Errorf("metadata %q lacks %q", e.Metadata, tt.metadata)
			}
		})
	}
}

// A field goes by its own name and by that of its flag, in every form of a file; both at once are refused.
func TestLoad_NamesOfFlags(t *testing.T) {
	inEmptyDir(t)
	for file, text := range map[string]string{
		"a.csv":   "prompt,steps,n\na fox,4,2\n",
		"a.jsonl": `{"prompt": "a fox", "steps": 4, "n": 2, "rollout": {"sde_steps": [1]}}`,
		"b.jsonl": `{"prompt": "a fox", "num_inference_steps": 4, "group_size": 2, "rollout": {"sde_step_indices": [1]}}`,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		e := event(t, mustLoad(t, "--prompts", file, "--steps", "9")[0])
		if *e.NumInferenceSteps != 4 || *e.GroupSize != 2 || len(e.Metadata) > 0 {
			t.Errorf("%s: %+v", file, e)
		}
	}
	for text, says := range map[string]string{
		`{"prompt": "a fox", "steps": 4, "num_inference_steps": 4}`: "line 1: steps and num_inference_steps: both given; must be one",
		`{"prompt": "a fox", "steps": 0}`:                           "must be between 1 and 1000",
		`{"prompt": "a fox", "sde_steps": [1]}`:                     "did you mean rollout.sde_step_indices?",
	} {
		if err := os.WriteFile("bad.jsonl", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		expect(t, exitUsage, says, "run", "--dry-run", "--model", "synthetic", "--prompts", "bad.jsonl")
	}
	expect(t, exitOK, "num_inference_steps 4", "prompts", "a.csv")
}

// A record's own answer wins over the flag's, and a reward's own over both; prompts do not
// share what they are given.
func TestLoad_GroundTruth(t *testing.T) {
	file := filepath.Join(t.TempDir(), "p.jsonl")
	lines := `{"prompt": "a", "ground_truth": "own"}
{"prompt": "b"}
{"prompt": "c", "ground_truth": "own", "reward": [{"name": "ocr", "ground_truth": "mine"}, {"name": "glyph"}, {"name": "diversity"}]}
`
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	prompts := mustLoad(t, "--prompts", file, "--reward", "ocr", "--ground-truth", "flag")
	var got [][]string
	for _, p := range prompts {
		var truths []string
		for _, r := range event(t, p).Reward {
			truths = append(truths, r.GroundTruth.Text())
		}
		got = append(got, truths)
	}
	if want := [][]string{{"own"}, {"flag"}, {"mine", "own", ""}}; !reflect.DeepEqual(got, want) {
		t.Errorf("ground truths %q, want %q", got, want)
	}
}

// The shards together are the whole: the same bytes, so the same uids, seeds and batches,
// whatever machine has which.
func TestLoad_ShardsAreTheWhole(t *testing.T) {
	for _, file := range []string{
		"ocr.txt", "prompts.jsonl", "prompts.json", "verl-ocr.jsonl", "geneval.jsonl",
		"prompts.csv",
	} {
		for _, args := range [][]string{
			nil,
			{"--shuffle", "7", "--seed", "3"},
			{"--batch-size", "2", "--epoch", "1", "--step", "10", "--std", "global"},
			{"--offset", "1", "--template", "{prompt}, {index}"},
		} {
			args = append([]string{"-n", "3", "--prompts", examples + file}, args...)
			whole := map[string]string{}
			for _, p := range mustLoad(t, args...) {
				data, err := p.encode()
				if err != nil {
					t.Fatal(err)
				}
				whole[string(p.uid)] = string(data)
			}
			for _, n := range []int{2, 3} {
				union := map[string]string{}
				for i := range n {
					part, _, err := loadPrompts(append(args, "--shard", fmt.Sprintf("%d/%d", i, n))...)
					if err != nil && !strings.Contains(err.Error(), "no prompts left") {
						t.Fatalf("%q shard %d/%d: %v", args, i, n, err)
					}
					for _, p := range part {
						data, err := p.encode()
						if err != nil {
							t.Fatal(err)
						}
						if union[string(p.uid)] != "" {
							t.Errorf("%q: %s is in two of %d shards", args, p.uid, n)
						}
						union[string(p.uid)] = string(data)
					}
				}
				if !reflect.DeepEqual(union, whole) {
					t.Errorf("%q: %d shards have %d prompts, not the %d of the whole", args, n, len(union), len(whole))
				}
			}
		}
	}
}

// What is left out of a file moves no other uid.
func TestLoad_UIDsStayInPlace(t *testing.T) {
	file := examples + "ocr.txt"
	all := uidsOf(mustLoad(t, "--prompts", file))
	for _, tt := range []struct {
		args []string
		want []string
	}{
		{[]string{"--offset", "2"}, all[2:]},
		{[]string{"--limit", "2"}, all[:2]},
		{[]string{"--offset", "1", "--limit", "1"}, all[1:2]},
	} {
		if got := uidsOf(mustLoad(t, append(tt.args, "--prompts", file)...)); !slices.Equal(got, tt.want) {
			t.Errorf("%q: %q, want %q", tt.args, got, tt.want)
		}
	}
	bad := filepath.Join(t.TempDir(), "p.jsonl")
	if err := os.WriteFile(bad, []byte("{\"prompt\": \"a\"}\nnope\n{\"prompt\": \"c\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := uidsOf(mustLoad(t, "--skip-bad", "--prompts", bad)); !slices.Equal(got, []string{"0000-a", "0002-c"}) {
		t.Errorf("with a bad line: %q", got)
	}
	// A record whose values are of another kind could not be read as a prompt.
	for record, fault := range map[string]string{
		`{"prompt": 3}`:                                         `prompt: 3; must be a text, or a list of messages {role, content}`,
		`{"prompt": "b", "group_size": "four"}`:                 `group_size: "four"; must be an integer`,
		`{"prompt": "b", "start": 7}`:                           `start: 7; must be a map`,
		`{"prompt": "b", "rollout": {"sde_step_indices": "1"}}`: `rollout.sde_step_indices: "1"; must be a list`,
	} {
		lines := "{\"prompt\": \"a\", \"uid\": null}\n" + record +
			"\n{\"messages\": [{\"role\": \"user\", \"content\": \"c\"}]}\n"
		if err := os.WriteFile(bad, []byte(lines), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := loadPrompts("--prompts", bad); err == nil ||
			!strings.Contains(err.Error(), bad+" line 2: "+fault) {
			t.Errorf("%s: %v; want line 2 and %s", record, err, fault)
		}
		prompts, p, err := loadPrompts("--prompts", bad, "--skip-bad")
		if got := uidsOf(prompts); err != nil || !slices.Equal(got, []string{"0000-a", "0002-c"}) ||
			len(p.loaded.reader.Bad) != 1 {
			t.Errorf("%s: %q without it, %v bad, %v", record, got, p.loaded.reader.Bad, err)
		}
	}
	if got := uidsOf(mustLoad(t, "--prompts", "-", "x", "y")); !slices.Equal(got,
		[]string{"0000-x", "0001-y", "0002-from-stdin"}) {
		t.Errorf("arguments and stdin: %q", got)
	}
}

func TestLoad_Batches(t *testing.T) {
	type batch = schemas.BatchSpec
	batches := func(args ...string) []*batch {
		var out []*batch
		for _, p := range mustLoad(t, append(args, "a", "b", "c", "d", "e")...) {
			out = append(out, event(t, p).Batch)
		}
		return out
	}
	if got := batches(); got[0] != nil {
		t.Errorf("without need there is a batch: %+v", got[0])
	}
	for _, args := range [][]string{
		{"--std", "global"},
		{"--batch-id", "all"},
		{"--estimator", "gpg"},
		{"--estimator", "reinforce_plus_plus", "--batch-id", "all"},
	} {
		for _, b := range batches(args...) {
			if !reflect.DeepEqual(b, &batch{ID: "all", Groups: 5}) {
				t.Errorf("%q: %+v, want one batch of all", args, b)
			}
		}
	}
	got := batches("--batch-size", "2", "--step", "7", "--epoch", "3", "--batch-id", "e3")
	for i, b := range got {
		groups := []int64{2, 2, 2, 2, 1}[i]
		if b.Groups != groups || *b.Step != 7+int64(i/2) || *b.Epoch != 3 ||
			!strings.HasPrefix(b.ID, fmt.Sprintf("e3-%04d-", i/2)) {
			t.Errorf("batch of prompt %d: %+v", i, b)
		}
	}
	if got[0].ID != got[1].ID || got[1].ID == got[2].ID {
		t.Errorf("ids %s, %s, %s", got[0].ID, got[1].ID, got[2].ID)
	}
	again := batches("--batch-size", "2")
	if fewer := mustLoad(t, "--batch-size", "2", "a", "x"); event(t, fewer[0]).Batch.ID == again[0].ID {
		t.Error("other prompts have a batch of the same name")
	}
}

// All estimators can be had, with the options that they have.
func TestLoad_Estimators(t *testing.T) {
	for _, name := range estimator.Names() {
		e := event(t, mustLoad(t, "--estimator", name, "a", "b")[0])
		def, err := estimator.Default(name)
		if err != nil {
			t.Fatal(err)
		}
		if name == estimator.GDPO {
			def.Weights = []float64{1}
		}
		if e.Advantage.Estimator != name || (e.Batch != nil) != def.NeedsBatch() {
			t.Errorf("%s: %+v, batch %+v", name, e.Advantage, e.Batch)
		}
	}
	e := event(t, mustLoad(t, "--estimator", "reinforce_plus_plus", "--gamma", "0.9", "--std-basis", "expanded",
		"--epsilon", "1e-6",
		"--adv-clip-max", "3", "--zero-std", "refill", "--failed-groups", "refill", "--refill-rounds", "2",
		"--max-policy-span", "4", "--mixed-schedules", "a")[0])
	if a := e.Advantage; *a.Gamma != 0.9 || a.StdBasis != "expanded" || *a.Epsilon != 1e-6 || *a.AdvClipMax != 3 {
		t.Errorf("advantage %+v", a)
	}
	if g := e.GroupPolicy; g.ZeroStd != "refill" || g.Failed != "refill" || *g.RefillRounds != 2 ||
		*g.MaxPolicySpan != 4 || !g.MixedSchedules {
		t.Errorf("group policy %+v", g)
	}
	if e := event(t, mustLoad(t, "--estimator", "per_prompt", "--adv-mode", "dpo",
		"a")[0]); e.Advantage.Mode != "dpo" || e.GroupPolicy != nil {
		t.Errorf("advantage %+v, group policy %+v", e.Advantage, e.GroupPolicy)
	}
}

// A window draws by its own seed, else by that of the noise, else by the run.
func TestLoad_Window(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want schemas.SDEWindow
	}{
		{[]string{"--sde-window", "2"}, schemas.SDEWindow{Size: 2}},
		{[]string{"--sde-window", "2:0-5:noncontiguous"}, schemas.SDEWindow{Size: 2, Range: []int64{0, 5}, Strategy: "noncontiguous"}},
		{[]string{"--sde-window", "2:0-5:random:7", "--seed", "9"}, schemas.SDEWindow{Size: 2, Range: []int64{0, 5}, Strategy: "random", Seed: new(int64(7))}},
		{[]string{"--sde-window", "2:::7"}, schemas.SDEWindow{Size: 2, Seed: new(int64(7))}},
		{[]string{"--sde-window", "2", "--seed", "9"}, schemas.SDEWindow{Size: 2, Seed: new(int64(9))}},
	} {
		if got := event(t, mustLoad(t, append(tt.args, "a")...)[0]).Rollout.SDEWindow; !reflect.DeepEqual(got,
			&tt.want) {
			t.Errorf("%q: %+v, want %+v", tt.args, got, tt.want)
		}
	}
}

func TestLoad_Rewards(t *testing.T) {
	e := event(t, mustLoad(t, "--reward", "ocr=2,nats:pick", "--optional-reward", "external:human=0.5", "--reward-param", "ocr.psm=7", "--reward-param", "nats:pick.note=a=b, c", `a "b"`)[0])
	want := []schemas.RewardSpec{
		{Name: "ocr", Weight: new(2.0), Params: map[string]string{"psm": "7"}},
		{Name: "nats:pick", Params: map[string]string{"note": "a=b, c"}},
		{Name: "external:human", Weight: new(0.5), Required: new(false)},
	}
	if !reflect.DeepEqual(e.Reward, want) {
		t.Errorf("rewards %+v, want %+v", e.Reward, want)
	}
}

// Whatever can be seen to be wrong is said at once, by name, as wrong usage.
func TestLoad_Errors(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := file("plain.txt", "a sign that says \"A\"\n\na sign\n")
	table := file("t.csv", "prompt,seed\na,x\n")
	twins := file("twins.jsonl", `{"prompt": "a", "uid": "u"}`+"\n"+`{"prompt": "b", "uid": "u"}`+"\n")
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--prompts", pipe}, "--prompts: " + pipe + ": a pipe without a writer; must be a file, or a pipe that a program writes to"},
		{[]string{}, "no prompts; give them as arguments, or a file with --prompts"},
		{[]string{"--prompts", filepath.Join(dir, "none.txt")}, "--prompts: open " + filepath.Join(dir, "none.txt") + ": no such file or directory"},
		{[]string{"--prompts", table}, "--prompts: " + table + ` line 2: seed: "x"; must be an integer`},
		{[]string{"--prompts", "."}, "--prompts: .: a folder; must be a file"},
		{[]string{"--sde-steps", "1", "--sde-window", "2:0-2", "a"}, "--sde-window: set beside --sde-steps; must be the only one of the two"},
		{[]string{"--prompts", table, "--skip-bad"}, "--prompts: no prompts in " + table + ", and 1 bad record"},
		{[]string{"--prompts", plain, "--prompts-format", "xml"}, `--prompts-format: "xml"; must be one of auto, text, csv, tsv, parquet, json, meander, metadata, verl`},
		{[]string{"--prompts", file("x.parquet", "PAR1")}, "no Parquet file: it does not begin with PAR1; "},
		{[]string{"--prompts", twins}, `prompts 1 and 2 have the same uid "u"`},
		{[]string{"--prompts", plain, "--reward", "ocr"}, plain + ` line 3: --reward: ground_truth: empty, and the prompt has no text in double quotes; ocr needs one`},
		{[]string{"--reward", "ocr", "a sign"}, `prompt 1, "a sign": --reward: ground_truth: empty`},
		{[]string{"--prompts", plain, "--offset", "100"}, "no prompts left of 2: 0 after --offset and --limit"},
		{[]string{"--prompts", plain, "--template", "{colour} {prompt}"}, plain + " line 1: colour: must have a value, since the template has {colour}"},
		{[]string{"--template", "sign", "a"}, `--template: "sign"; must have at least one field, such as {prompt}`},
		{[]string{"--shard", "2/2", "a"}, `--shard: "2/2"; must be I/N with I from 0 to N-1, e.g. 0/4`},
		{[]string{"--shard", "1", "a"}, `--shard: "1"; must be I/N`},
		{[]string{"--shard", "0/2", "--std", "global", "a", "b"}, "--shard: a batch must not be split; give the size of batches with --batch-size"},
		{[]string{"--offset", "-1", "a"}, "--offset: -1; must be at least 0"},
		{[]string{"--prompts", file("empty.txt", "")}, "must have at least one, a line or a record each"},
		{[]string{"--start-step", "5", "a"}, "--start-latents: not given; must be there, or --branch-from, or --start-image"},
		{[]string{"--prune-step", "5", "a"}, "--prune-log-prob-below: not given; must be there, or --prune-log-prob-above"},
		{[]string{"--prune-log-prob-above", "5", "a"}, "--prune-step: not given; must be between 1 and 999"},
		{[]string{"--leaf", "5", "a"}, "--tree: not given; must be the tree of --leaf"},
		{[]string{"--max-turns", "5", "a"}, "--interaction: not given; must be the interaction"},
		{[]string{"--probability", "0.5", "a"}, "--start-image: not given; must be the images to roll, or use 'meander scheduled'"},
		{[]string{"--step", "1", "a"}, "--step, --epoch: are for batches; join the prompts with --batch-size or --batch-id"},
		{[]string{"--reward", "beauty", "a"}, `--reward: "beauty"; must be one of ` + strings.Join(scorer.Kinds(), ", ")},
		{[]string{"--optional-reward", "http", "a"}, `--optional-reward: "http"; must be http:NAME`},
		{[]string{"--reward", "jpeg_compressibility=much", "a"}, `--reward: "jpeg_compressibility=much"; the weight must be a number`},
		{[]string{"--reward-param", "ocr.psm=7", `a "b"`}, `--reward-param: "ocr.psm=7"; "ocr" must be named by --reward or --optional-reward`},
		{[]string{"--reward", "ocr", "--reward-param", "ocr.psm", `a "b"`}, `--reward-param: "ocr.psm"; must be NAME.KEY=VALUE`},
		{[]string{"--reward", "ocr", "--reward-param", "ocr.speed=7", `a "b"`}, `params: "speed" is unknown; ocr has`},
		{[]string{"--estimator", "flow_gpro", "a"}, `--estimator: "flow_gpro"; did you mean flow_grpo? must be one of ` + strings.Join(estimator.Names(), ", ")},
		{[]string{"--estimator", "rloo", "--gamma", "0.9", "a"}, "--gamma: 0.9; estimator rloo does not discount, leave it out"},
		{[]string{"--std", "none", "--epsilon", "1", "a"}, "--epsilon: 1; std none divides by no standard deviation, leave it out"},
		{[]string{"--estimator", "reinforce_plus_plus", "--batch-id", "all", "--gamma", "0", "a"}, "--gamma: 0; must be above 0 and at most 1"},
		{[]string{"--reward", "glph", "a"}, `--reward: "glph"; did you mean glyph?`},
		{[]string{"--sde-type", "sd", "--steps", "0", "a", "b"}, "--steps: 0; must be between 1 and 1000\n--sde-type: \"sd\"; must be one of sde, cps, dance_sde, ddim, ode"},
		{[]string{"--sde-window", "2:9-3", "a"}, "--sde-window: [9 3]; must be a part of"},
		{[]string{"--sde-window", "2:0-5:random:-7", "a"}, `--sde-window: "2:0-5:random:-7"; must be SIZE[:LOW-HIGH[:STRATEGY[:SEED]]]`},
		{[]string{"--zero-std", "forget", "a"}, `--zero-std: "forget"; must be one of keep, drop, refill`},
		{[]string{"--std", "globl", "a"}, `--std: "globl"; must be one of group, global, none`},
	} {
		_, _, err := loadPrompts(tt.args...)
		var exit *exitError
		if !errors.As(err, &exit) || exit.status != exitUsage {
			t.Errorf("%q: error %v, want one of usage", tt.args, err)
			continue
		}
		if !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: error\n %v\nwant\n %s", tt.args, err, tt.want)
		}
	}
}

// A shell's <(command) is a pipe, too.
func TestLoad_PipeWithWriter(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString("a\nb\n"); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	prompts := mustLoad(t, "--prompts", fmt.Sprintf("/dev/fd/%d", r.Fd()))
	if len(prompts) != 2 || prompts[1].text != "b" {
		t.Errorf("prompts %v", prompts)
	}
}

// A run may have as many prompts as a file.
func TestClaim_ManyPrompts(t *testing.T) {
	bustest.Sequential(t, others)
	a := &app{store: t.TempDir(), logLevel: "error"}
	conn, err := a.connect(t.Context(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	args := make([]string, 50_000)
	for i := range args {
		args[i] = fmt.Sprintf("a sign that says %d and goes on for a while", i)
	}
	prompts := mustLoad(t, args...)
	r := &runner{app: a, id: "many", services: defaultServices()}
	plan := &estimated{facts: estimate.Unknown()}
	for range 2 {
		if r.with, _, err = r.startedWith(t.Context(), conn, prompts, plan); err == nil {
			err = r.claimRun(t.Context(), conn)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := r.startedWith(t.Context(), conn, prompts[1:], plan); err == nil {
		t.Error("the run takes other prompts")
	}
}
