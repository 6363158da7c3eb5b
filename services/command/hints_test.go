package command

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What people of other tools type is answered with the command line to write.
func TestHints(t *testing.T) {
	t.Chdir(t.TempDir())
	for line, says := range map[string]string{
		"up --port 4333":                           "did you mean --listen? Write: meander up --listen 127.0.0.1:4333",
		"run --port 4333 x":                        "Write: meander run --nats nats://127.0.0.1:4333 x",
		"run --noise 0.7 x":                        "did you mean --initial-noise or --noise-level?",
		"run --guidance_scale=3 a,b":               "Write: meander run --true-cfg-scale=3 a,b",
		"run --text.logits.mode full x":            "Write: meander run --logits full x",
		"run --rollout.sde_steps 2 x":              "Write: meander run --sde-steps 2 x",
		"run --rollout.sde_step_indices 2 x":       "Write: meander run --sde-steps 2 x",
		"run --text-temperature 2 x":               "Write: meander run --temperature 2 x",
		"publish --run r --advantage.mode sum x":   "Write: meander publish --run r --adv-mode sum x",
		"run --prompt fox --seed 3":                "a prompt is an argument: meander run fox --seed 3",
		"run --prompt=fox":                         "a prompt is an argument: meander run fox\n",
		"run --size 64x64 x":                       "did you mean --height or --width?\n",
		"run --resolution 64 x":                    "did you mean --height or --width?\n",
		"run x --verbose":                          "did you mean --log-level?\n",
		"run a photo of 3 cats":                    "write a prompt of several words in quotes: meander run 'a photo of 3 cats'",
		"run --foo x":                              "unknown flag: --foo\n",
		"run --reward pickscore x":                 "start 'meander-scorer pickscore', and write nats:pickscore",
		"run --reward HPS_v2 x":                    "start 'meander-scorer hpsv2', and write nats:hpsv2",
		"run --reward jpeg x":                      "did you mean jpeg_compressibility or jpeg_incompressibility?",
		"ls":                                       "did you mean 'meander runs ls'?",
		"logs":                                     "did you mean 'meander watch'?",
		"stop":                                     "'meander cancel RUN' to end a run, or Ctrl-C to end 'meander up'?",
		"export":                                   "did you mean 'meander runs export RUN'?",
		"statsu":                                   "did you mean 'meander status'?",
		"run -n 2 a red sign --seed 3":             "write a prompt of several words in quotes: meander run -n 2 'a red sign' --seed 3",
		"publish --run demo red sign on the table": "meander publish --run demo 'red sign on the table'",
		"up --listen 4333":                         "--listen: \"4333\"; must be host:port; write: meander up --listen 127.0.0.1:4333",
		"up --listen=localhost":                    "write: meander up --listen=localhost:4222",
		"run --run my/run x":                       "must be 1 to 64 characters of A-Z a-z 0-9 _ -, such as my-run",
		"completion nosh":                          `meander completion has no command "nosh"`,
	} {
		expect(t, exitUsage, says, strings.Fields(line)...)
	}
	expect(t, exitOK, "zsh          Generate", "completion", "--help")
	expect(t, exitOK, "source <(meander completion zsh)", "completion", "zsh", "--help")
}

// The functions that a hint names are those of meander-scorer.
func TestHints_Workers(t *testing.T) {
	files, err := filepath.Glob("../../pkg/client/python/meander/rewards/*.py")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, f := range files {
		source, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^    name = "(.+)"$`).FindAllSubmatch(source, -1) {
			seen++
			expect(t, exitUsage, "start 'meander-scorer "+string(m[1])+"'", "run", "--reward", string(m[1]), "x")
		}
	}
	if seen < 11 {
		t.Errorf("%d functions", seen)
	}
}

// A flag has the name of its field, too, with dashes or underscores; the flag's own is shown.
func TestFlags_NamesOfFields(t *testing.T) {
	inStore(t)
	for _, flag := range []string{"--steps", "--num-inference-steps", "--num_inference_steps"} {
		expect(t, exitOK, "3 a sample, 6 in all", "run", "--model", "synthetic", "--dry-run", "-n", "2", flag, "3", "x")
	}
	if help := expect(t, exitOK, "--steps", "run", "--help"); strings.Contains(help, "num-inference-steps") {
		t.Errorf("help shows two names:\n%s", help)
	}
}
