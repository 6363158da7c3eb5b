package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/hub/hubtest"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
)

// A model of the Hub goes by its name: it is downloaded with a word on it, found again without the Hub, and its commit
// is with its policy and its run.
func TestFetch_Run(t *testing.T) {
	bustest.Sequential(t, others)
	inEmptyDir(t)
	h := hubtest.Start(t)
	pipeline := h.Add(t, "models/org/tiny-image", checkpoint.Dir(t, checkpoint.Config{}))
	sums := t.TempDir()
	if err := (qwen2test.Random{Seed: 3, MaxPositions: 64}).Write(sums); err != nil {
		t.Fatal(err)
	}
	text := h.Add(t, "models/org/tiny-text", sums)
	pipeline.CutAfter, pipeline.Cuts = 1000, 1 // goes on in silence of the user
	run := []string{
		"run", "--run", "r", "--steps", "2", "--out", "-", "--reward", "jpeg_compressibility", "--model",
		"org/tiny-image", "a fox",
	}
	_, said, err := command(t.Context(), run...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"downloading org/tiny-image@" + pipeline.Commit() + ": ", " files, ", "cut off after", "downloaded ",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not said:\n%s", want, said)
		}
	}
	t.Setenv("HF_HUB_OFFLINE", "1")
	h.Asked()
	run[2] = "again"
	if _, said, err := command(t.Context(), run...); err != nil || strings.Contains(said, "downloading") ||
		len(h.Asked()) > 0 {
		t.Errorf("offline: %v\n%s", err, said)
	}
	source := "org/tiny-image@" + pipeline.Commit()
	expect(t, exitOK, source+", of the Hugging Face Hub", "policy", "show")
	expect(t, exitOK, source+", of the Hugging Face Hub", "model", "info", "org/tiny-image@main")
	expect(t, exitOK, "verified", "verify", "again")
	expect(t, exitUsage, "HF_HUB_OFFLINE=1 forbids downloads", "run", "--model", "org/tiny-text", "2+2=?")
	t.Setenv("HF_HUB_OFFLINE", "")
	expect(t, exitOK, filepath.Join("models--org--tiny-text", "snapshots", text.Commit()), "model", "fetch",
		"org/tiny-text")
	expect(t, exitOK, "1 of 1 groups complete", "run", "--run", "text", "--out", "-", "-n", "1", "--max-new-tokens",
		"2",
		"--reward", "max_prob_mean", "--model", "org/tiny-text", "2+2=?")
}

// An adapter of the Hub goes by its name, too: its commit is with the policy, and without the Hub it is found again.
func TestFetch_Adapter(t *testing.T) {
	bustest.Sequential(t, others)
	adapter, err := filepath.Abs("../../deploy/demo/adapter")
	if err != nil {
		t.Fatal(err)
	}
	inEmptyDir(t)
	h := hubtest.Start(t)
	r := h.Add(t, "models/org/lora", adapter)
	r.Files["training.bin"] = []byte("what nobody reads")
	source := "org/lora@" + r.Commit()
	run := []string{
		"run", "--run", "r", "-n", "1", "--steps", "2", "--out", "-", "--reward", "jpeg_compressibility",
		"--adapter", "org/lora", "a red sign",
	}
	expect(t, exitOK, "downloading "+source+": 2 files, ", run...)
	t.Setenv("HF_HUB_OFFLINE", "1")
	h.Asked()
	run[2] = "again"
	expect(t, exitOK, "1 of 1 groups complete", run...)
	if asked := h.Asked(); len(asked) > 0 {
		t.Errorf("offline it asked %q", asked)
	}
	expect(t, exitOK, source, "policy", "show")
	expect(t, exitOK, source, "runs", "show", "r")
	expect(t, exitOK, "verified", "verify", "r")
}

// What is wrong with a name of the Hub is said with what mends it, by exit status 2.
func TestFetch_Refusals(t *testing.T) {
	inEmptyDir(t)
	h := hubtest.Start(t)
	h.Repos["models/org/gated"] = &hubtest.Repo{Gated: true, Files: map[string][]byte{"config.json": []byte("{}")}}
	h.Repos["datasets/org/data"] = &hubtest.Repo{Files: map[string][]byte{"a.csv": []byte("x")}}
	for line, says := range map[string]string{
		"run --model org/gated x":                       "--model: org/gated: config.json: the Hub does not give it: gated (401): accept its terms at " + h.URL + "/org/gated",
		"up --model org/none":                           "--model: org/none: the Hub does not give it: there is no such model at",
		"run --dry-run --model org/gated@v2 x":          `it has no revision "v2": leave @v2 out for main`,
		"run --adapter org/none --model synthetic x":    "--adapter: org/none:",
		"teacher --model org/none":                      "--model: org/none",
		"model info org/gated@":                         `revision ""; must be a branch, a tag or a commit, as in org/gated@main`,
		"run --model https://huggingface.co/org/name x": "a model of the Hub goes by its name: org/name",
		"run --model org/name/transformer x":            "a model of the Hub is ORG/NAME, as in org/name",
		"model fetch ./folder":                          `"./folder": must be ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub`,
		"model fetch org/none --adapter":                "or it is private: check the spelling",
	} {
		expect(t, exitUsage, says, strings.Fields(line)...)
	}
	// A folder of that name is meant before the Hub is asked.
	if err := os.MkdirAll("org/gated", 0o755); err != nil {
		t.Fatal(err)
	}
	h.Asked()
	expect(t, exitUsage, "looked in org/gated", "model", "info", "org/gated")
	if asked := h.Asked(); len(asked) > 0 {
		t.Errorf("asked %q", asked)
	}
}

// A file of prompts of the Hub is read as one on this disk, and the estimate names its commit.
func TestFetch_Prompts(t *testing.T) {
	inEmptyDir(t)
	h := hubtest.Start(t)
	type row struct {
		Caption string `parquet:"caption"`
	}
	if err := parquet.WriteFile("train.parquet", []row{{"a fox"}, {"a red fox"}}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("train.parquet")
	if err != nil {
		t.Fatal(err)
	}
	r := &hubtest.Repo{Files: map[string][]byte{"data/train.parquet": b, "p.jsonl": []byte(`{"prompt": "a fox"}`)}}
	h.Repos["datasets/org/prompts"] = r
	address := "hf://datasets/org/prompts/data/train.parquet"
	run := []string{"run", "--dry-run", "--model", "synthetic", "--prompt-column", "caption", "--prompts"}
	expect(t, exitOK, "2 prompts", append(run, address)...)
	expect(t, exitOK, "hf://datasets/org/prompts@"+r.Commit()+"/data/train.parquet", "prompts", "--prompt-column",
		"caption", address+"@"+r.Commit())
	expect(t, exitOK, "1 prompt", "prompts", "hf://datasets/org/prompts@main/p.jsonl")
	for file, says := range map[string]string{
		"hf://datasets/org/prompts":            "--prompts: \"hf://datasets/org/prompts\": must be hf://datasets/ORG/NAME/FILE",
		"hf://org/prompts/a.jsonl":             "must be hf://datasets/ORG/NAME/FILE",
		"hf://datasets/org/prompts/no.parquet": "it has no file no.parquet: see " + h.URL + "/datasets/org/prompts/tree/main",
		"hf://datasets/org/none/a.parquet":     "there is no such data set",
	} {
		expect(t, exitUsage, says, append(run, file)...)
	}
}

// A run goes to the Hub as a data set with a card, which says the commit of the model; again nothing is sent twice.
func TestFetch_Push(t *testing.T) {
	bustest.Sequential(t, others)
	inEmptyDir(t)
	h := hubtest.Start(t)
	r := h.Add(t, "models/org/tiny-image", checkpoint.Dir(t, checkpoint.Config{}))
	expect(t, exitOK, "1 of 1 groups complete", "run", "--run", "r", "--steps", "2", "--out", "-", "--sde-steps", "1",
		"--reward", "jpeg_compressibility", "--model", "org/tiny-image", "a | fox")
	push := []string{"runs", "export", "r", "--push", "me/rollouts"}
	expect(t, exitUsage, "--push: me/rollouts: there is no token: log in with 'hf auth login'", push...)
	t.Setenv("HF_TOKEN", "read-only")
	expect(t, exitUsage, "the token from HF_TOKEN may not write there (403)", push...)
	t.Setenv("HF_TOKEN", "hf_write")
	expect(t, exitUsage, `--format: "archive" with --push; must be one of parquet`, append(push, "--format", "archive")...)
	expect(t, exitUsage, `--push: "rollouts"; must be ORG/NAME`, "runs", "export", "r", "--push", "rollouts")
	h.PartSize = 5000 // as files of more than 5 GB are sent to the Hub
	h.Asked()
	expect(t, exitOK, "me/rollouts is on the Hugging Face Hub: "+h.URL+"/commit/", push...)
	if asked := strings.Join(h.Asked(), "\n"); !strings.Contains(asked, "/2\nPUT ") ||
		!strings.Contains(asked, "POST /complete/") {
		t.Errorf("it is not sent in parts:\n%s", asked)
	}
	made := h.Repos["datasets/me/rollouts"]
	shard, _ := os.ReadFile("r/00000.parquet")
	if len(shard) == 0 || string(made.Files["00000.parquet"]) != string(shard) || len(made.Files) != 3 {
		t.Errorf("the Hub has %d files, %d bytes of %d", len(made.Files), len(made.Files["00000.parquet"]), len(shard))
	}
	card := string(made.Files["README.md"])
	for _, want := range []string{
		"---\npretty_name: meander run r\n", "base_model: org/tiny-image\n", "data_files: \"*.parquet\"",
		"| source | org/tiny-image@" + r.Commit() + " |", "jpeg_compressibility", "meander run --run r",
	} {
		if !strings.Contains(card, want) {
			t.Errorf("the card has no %q:\n%s", want, card)
		}
	}
	h.Asked()
	expect(t, exitOK, "is on the Hugging Face Hub", push...)
	for _, asked := range h.Asked() {
		if strings.HasPrefix(asked, "PUT ") {
			t.Errorf("sent again: %s", asked)
		}
	}
	// What was pushed is found by its address: as prompts, samples are refused.
	expect(t, exitFailed, "parquet, 8 rows", "prompts", "hf://datasets/me/rollouts/00000.parquet")
}
