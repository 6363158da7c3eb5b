package integration_test

import (
	"cmp"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/meander-rl/meander"

// root is the repository's top folder, seen from this package.
const root = ".."

// layers says which packages of the project each package may import. What is not
// listed is forbidden: imports go down only, siblings never meet, and pkg/models/model and
// pkg/flow are joined by the sampler alone. pkg/models imports nothing else of the project but the models that ship.
var layers = map[string][]string{
	// Leaves: pure, known to everybody above.
	"schemas":                nil,
	"pkg/models/tensor":      nil,
	"pkg/scorer":             {"pkg/models/media"},
	"pkg/estimator":          {"schemas"},
	"pkg/dataset":            {"pkg/models/strictjson"},
	"pkg/models/jinja":       nil,
	"pkg/models/userpath":    nil,
	"pkg/models/hub":         {"pkg/models/userpath"}, // the cache of the Hugging Face Hub, and downloads into it
	"pkg/models/hub/hubtest": nil,                     // a Hub for tests
	"deploy":                 nil,                     // files that ship inside the programs

	// Reads JSON of strangers for everybody.
	"pkg/models/strictjson": nil,
	"pkg/strictmsgpack":     nil,

	// Clients of servers that draw samples: protocols alone, and torch's generator. Their tests have servers of
	// recorded bytes.
	"pkg/torchrandom":                 nil,
	"pkg/models/pool":                 nil, // who computes or draws, wherever it is
	"pkg/remotehttp":                  {"pkg/models/pool", "pkg/models/strictjson"},
	"pkg/remotelm":                    {"pkg/models/pool", "pkg/remotehttp", "pkg/models/strictjson"},
	"pkg/remotelm/remotelmtest":       nil,
	"pkg/remoteimage":                 {"pkg/models/pool", "pkg/remotehttp", "pkg/models/safetensors", "pkg/strictmsgpack", "pkg/torchrandom"},
	"pkg/remoteimage/remoteimagetest": nil,

	"pkg/heap":    nil, // the collector of every program
	"pkg/tracing": {"schemas"},

	// The embedded server knows nothing of what it carries.
	"pkg/natsd": nil,

	"pkg/scorer/internal/wire": {"pkg/models/media", "pkg/scorer", "pkg/models/strictjson", "pkg/strictmsgpack", "schemas"},
	"pkg/scorer/httpscore":     {"pkg/scorer", "pkg/scorer/internal/wire", "schemas"},
	"pkg/scorer/natsscore":     {"pkg/scorer", "pkg/scorer/internal/wire", "schemas"},
	"pkg/scorer/scorerfile":    {"pkg/scorer", "pkg/scorer/internal/wire", "pkg/scorer/httpscore", "pkg/scorer/natsscore", "schemas"},

	"schemas/document":                         {"schemas", "pkg/estimator"}, // what the sources say, for the generator and for tests
	"schemas/gen":                              {"schemas/document"},
	"pkg/fields":                               {"schemas"},
	"pkg/models/safetensors":                   {"pkg/models/tensor"},
	"pkg/models/lora":                          {"pkg/models/hub", "pkg/models/safetensors", "pkg/models/tensor"}, // files and what they fit: for networks, and for clients that push them
	"pkg/models/tensor/cpu":                    {"pkg/models/tensor"},
	"pkg/models/tensor/cuda/driver":            nil,
	"pkg/models/tensor/cuda/kernels":           nil,
	"pkg/models/tensor/cuda/internal/cudashim": nil,
	"pkg/models/tensor/cuda/internal/cuext":    {"pkg/models/tensor/cuda/internal/cudashim", "pkg/models/tensor/cuda/driver"},
	"pkg/models/tensor/cuda/internal/cublaslt": {"pkg/models/tensor/cuda/driver"},
	"pkg/models/tensor/cuda/internal/gpu":      {"pkg/models/tensor/cuda/internal/cublaslt", "pkg/models/tensor/cuda/internal/cudashim", "pkg/models/tensor/cuda/internal/cuext", "pkg/models/tensor/cuda/driver"},
	"pkg/models/tensor/cuda":                   {"pkg/models/tensor", "pkg/models/tensor/cuda/driver", "pkg/models/tensor/cuda/internal/gpu", "pkg/models/tensor/cuda/kernels"},
	"pkg/models/tensor/devices":                {"pkg/models/tensor", "pkg/models/tensor/cpu", "pkg/models/tensor/cuda"}, // the one place that names them
	"pkg/models/tensor/reference":              {"pkg/models/tensor"},
	"pkg/models/tensor/tensortest":             {"pkg/models/tensor", "pkg/models/tensor/reference"},
	"pkg/flow":                                 {"pkg/models/portable", "pkg/models/strictjson", "pkg/models/tensor"},
	"pkg/flow/flowtest":                        {"pkg/flow"}, // whole rollouts
	"pkg/models/portable":                      nil,          // random words and elementary functions, the same on all machines
	"pkg/scheduled":                            {"pkg/flow", "pkg/models/portable", "schemas"},
	"pkg/stages":                               {"schemas", "pkg/flow"}, // what samples of several stages are made of
	"pkg/models/media":                         nil,                     // pixels, their digest and their file
	"pkg/models/media/mediatest":               nil,                     // a program in place of ffmpeg, for tests
	"pkg/models/model":                         {"pkg/models/hub", "deploy", "pkg/models/tensor", "pkg/models/safetensors", "pkg/models/lora", "pkg/models/media"},
	"pkg/models/model/nn":                      {"pkg/models/strictjson", "pkg/models/tensor", "pkg/models/safetensors", "pkg/models/lora", "pkg/models/model"},
	"pkg/models/tokenizer":                     {"pkg/models/strictjson", "pkg/models/safetensors"},
	"pkg/models/model/qwenimage":               {"pkg/models/hub", "pkg/models/strictjson", "pkg/models/media", "pkg/models/tensor", "pkg/models/tensor/cpu", "pkg/models/safetensors", "pkg/models/lora", "pkg/models/model", "pkg/models/model/nn", "pkg/models/tokenizer"}, // the CPU where no device is given
	"pkg/models/model/synthetic":               {"pkg/models/media", "pkg/models/model"},
	"pkg/models/model/remote":                  {"pkg/models/hub", "pkg/models/lora", "pkg/models/media", "pkg/models/model", "pkg/models/model/nn", "pkg/models/model/remote/internal/wire", "pkg/models/pool", "pkg/models/tokenizer", "pkg/models/safetensors", "pkg/models/tensor"},
	"pkg/models/model/remote/internal/wire":    {"pkg/models/model"},                                                                                                             // frames alone, for the client and the worker of tests
	"pkg/models/model/remote/remotetest":       {"pkg/models/media", "pkg/models/model", "pkg/models/model/remote/internal/wire", "pkg/models/safetensors", "pkg/models/tensor"}, // a worker for tests
	"pkg/models/model/families":                {"pkg/models/model", "pkg/models/model/qwenimage", "pkg/models/model/remote", "pkg/models/model/synthetic"},                      // the one place that names them
	"pkg/models/tokenizer/tokenizertest":       nil,
	"pkg/models/model/qwenimage/checkpoint":    {"pkg/models/tokenizer/tokenizertest", "pkg/models/tensor", "pkg/models/safetensors"}, // folders of random weights
	"pkg/models/decoding":                      {"pkg/models/portable"},
	"pkg/models/lm":                            {"pkg/models/decoding", "pkg/models/lora", "pkg/models/model", "pkg/models/safetensors", "pkg/models/tensor"},                                                                                                                                                         // where folders of models are looked for
	"pkg/models/lm/qwen2":                      {"pkg/models/hub", "pkg/models/strictjson", "pkg/models/decoding", "pkg/models/jinja", "pkg/models/lm", "pkg/models/lora", "pkg/models/model", "pkg/models/model/nn", "pkg/models/tokenizer", "pkg/models/safetensors", "pkg/models/tensor", "pkg/models/tensor/cpu"}, // the CPU where no device is given
	"pkg/models/lm/families":                   {"pkg/models/lm", "pkg/models/lm/qwen2"},                                                                                                                                                                                                                              // the one place that names them
	"pkg/models/model/modeltest":               {"pkg/models/media", "pkg/models/model"},
	"pkg/models/lm/qwen2/qwen2test":            {"pkg/models/tokenizer/tokenizertest", "pkg/models/safetensors", "pkg/models/tensor"}, // folders of random weights
	"pkg/auth":                                 {"schemas"},                                                                           // who may do what, as data: no connection
	"pkg/outcomes":                             {"schemas"},                                                                           // what became of what is stored: reads nothing
	"pkg/bus":                                  {"schemas", "pkg/auth", "pkg/models/userpath", "pkg/outcomes", "pkg/tracing"},
	"pkg/counters":                             {"schemas", "pkg/bus", "pkg/outcomes"},   // what is stored of runs, counted once
	"pkg/rules":                                {"schemas", "pkg/bus"},                   // what runs should not do
	"pkg/interaction":                          {"schemas", "pkg/scorer", "pkg/tracing"}, // what a sum comes to
	"pkg/bus/bustest":                          {"schemas", "pkg/bus", "pkg/natsd"},
	"pkg/client/policyloss":                    nil,
	"pkg/weightsdir":                           {"schemas", "pkg/models/safetensors"}, // files of weights that go by path
	"pkg/client":                               {"schemas", "pkg/bus", "pkg/tracing", "pkg/counters", "pkg/models/tensor", "pkg/models/lora", "pkg/weightsdir"},

	// What a run has stored, assembled; its contact sheets.
	"pkg/sheet":   {"pkg/models/media"},
	"pkg/view":    {"pkg/counters", "pkg/bus", "pkg/client", "pkg/models/media", "pkg/models/tensor", "pkg/outcomes", "pkg/sampling", "pkg/scorer", "pkg/stages", "schemas"},          // what is stored, as models
	"pkg/export":  {"pkg/view", "pkg/bus", "pkg/client", "pkg/models/media", "pkg/models/safetensors", "pkg/models/tensor", "pkg/results", "pkg/sampling", "pkg/outcomes", "schemas"}, // a run as files, and played again
	"pkg/results": {"pkg/counters", "pkg/view", "pkg/models/media", "pkg/outcomes", "schemas", "pkg/bus", "pkg/client", "pkg/estimator", "pkg/flow", "pkg/models/safetensors", "pkg/sampling", "pkg/scorer", "pkg/sheet", "pkg/models/tensor"},

	// What the settings of a sample mean.
	"pkg/sampling": {"schemas", "pkg/flow", "pkg/models/media", "pkg/models/tensor"},

	// Intake checks names and schedules, so it knows what exists; it runs none of it.
	"services/intake": {
		"schemas", "pkg/bus", "pkg/tracing", "pkg/flow", "pkg/models/media", "pkg/models/model", "pkg/sampling", "pkg/interaction", "pkg/scheduled", "pkg/stages", "pkg/outcomes", "pkg/counters",
		"pkg/scorer", "pkg/estimator", "services/internal/instrument",
	},
	"services/sampler/recorder":    {"pkg/bus", "pkg/flow", "pkg/interaction", "pkg/models/media", "pkg/models/model", "pkg/sampling", "schemas", "services/sampler/engine", "services/sampler/engine/images"},
	"services/sampler/weights":     {"pkg/models/hub", "pkg/bus", "pkg/models/lora", "pkg/models/safetensors", "pkg/models/tensor", "pkg/weightsdir", "schemas", "services/sampler/engine"},
	"services/reward":              {"pkg/interaction", "pkg/stages", "pkg/models/media", "schemas", "pkg/bus", "pkg/tracing", "pkg/models/tensor", "pkg/sampling", "pkg/scorer", "pkg/scorer/natsscore", "pkg/scorer/scorerfile", "services/internal/instrument"},
	"services/advantage":           {"schemas", "pkg/bus", "pkg/tracing", "pkg/estimator", "pkg/stages", "services/internal/instrument"},
	"services/janitor":             {"schemas", "pkg/bus", "pkg/counters", "pkg/rules", "pkg/weightsdir", "services/internal/instrument"},
	"services/internal/boot":       {"schemas", "pkg/fields", "pkg/heap", "pkg/auth", "pkg/bus", "services/internal/instrument"},
	"services/internal/instrument": {"schemas", "pkg/bus"},
	"services/internal/present":    {"services/internal/boot"}, // tables and text for people; sizes, terminals

	// The service has requests, turns and devices. Engines make samples and know nothing of these; models opens all
	// kinds.
	"services/sampler": {
		"pkg/bus", "pkg/interaction", "pkg/models/lm", "pkg/models/lm/families", "pkg/models/model", "pkg/models/model/families", "pkg/sampling",
		"pkg/models/tensor", "pkg/models/tensor/devices", "schemas", "services/internal/instrument", "services/sampler/engine",
		"services/sampler/engine/images", "services/sampler/models", "services/sampler/recorder",
		"services/sampler/weights",
	},
	"services/sampler/engine":            {"pkg/bus", "pkg/models/lm", "pkg/models/lora", "pkg/models/media", "pkg/models/model", "pkg/models/pool", "pkg/models/tensor", "pkg/remotehttp", "schemas"},
	"services/sampler/engine/enginetest": {"schemas", "services/sampler/engine"},
	"services/sampler/engine/texts":      {"pkg/bus", "pkg/models/decoding", "pkg/models/lm", "pkg/models/lora", "pkg/remotelm", "pkg/models/tensor", "schemas", "services/sampler/engine"},
	"services/sampler/engine/images": {
		"pkg/bus", "pkg/flow", "pkg/models/lora", "pkg/models/media", "pkg/models/model", "pkg/models/model/nn", "pkg/models/pool", "pkg/remotehttp", "pkg/remoteimage", "pkg/sampling",
		"pkg/scheduled", "pkg/models/tensor", "schemas", "services/sampler/engine",
	},

	"services/sampler/models": {
		"pkg/models/hub",
		"pkg/models/lm", "pkg/models/model", "pkg/models/model/remote", "pkg/remotehttp", "pkg/models/safetensors", "pkg/models/tensor", "pkg/models/tensor/devices",
		"schemas", "services/sampler/engine", "services/sampler/engine/images", "services/sampler/engine/texts",
	},

	// A thin main is one service and what all mains share.
	"services/cmd/meander-intake":    {"pkg/bus", "services/intake", "services/janitor", "services/internal/boot"}, // who sets the streams up frees them
	"services/cmd/meander-sampler":   {"services/sampler", "services/internal/boot"},
	"services/cmd/meander-reward":    {"services/reward", "services/internal/boot"},
	"services/cmd/meander-advantage": {"services/advantage", "services/internal/boot"},
	// The all-in-one and command line joins everything.
	"services/cmd/meander": {"services/command"},
	// What a program can do with services, without a command line: it stands above them.
	"services/pipeline": {
		"schemas", "pkg/bus", "pkg/models/model", "services/intake", "services/sampler", "services/reward", "services/advantage", "services/janitor", "services/internal/boot", "services/internal/instrument",
	},
	"services/verify": {
		"pkg/models/hub",
		"schemas", "pkg/bus", "pkg/flow", "pkg/sampling", "pkg/interaction", "pkg/scheduled", "pkg/stages", "pkg/models/model",
		"pkg/models/model/families", "pkg/models/lm", "pkg/models/lm/families", "pkg/models/decoding", "pkg/models/tensor", "pkg/models/tensor/devices",
		"services/sampler/engine", "services/sampler/engine/images", "services/sampler/engine/texts",
		"services/sampler/models", "services/sampler/weights",
		"pkg/weightsdir", // what of a file says that it is another than was pushed
	},
	"services/teacher": {
		"schemas", "pkg/bus", "pkg/models/decoding", "pkg/flow", "pkg/models/lm", "pkg/models/lm/families", "pkg/models/model", "pkg/models/model/families",
		"pkg/sampling", "pkg/models/tensor", "pkg/models/tensor/devices", "services/sampler/engine", "services/sampler/engine/images",
		"services/sampler/engine/texts", "services/sampler/models", "services/internal/instrument",
	},
	// Looks everything over: what runs, and what is on this machine.
	"services/doctor": {"pkg/outcomes", "schemas", "pkg/auth", "pkg/bus", "pkg/counters", "pkg/models/model", "pkg/models/model/families", "pkg/models/lm", "pkg/models/lm/families", "pkg/models/tensor/cpu", "pkg/models/tensor/devices", "services/reward", "services/sampler/models", "services/internal/boot", "services/internal/present"},
	// What prompts would take, by the rules of intake.
	"services/estimate": {
		"schemas", "pkg/bus", "pkg/estimator", "pkg/flow", "pkg/sampling", "pkg/scheduled", "services/intake",
		"services/pipeline",
	},
	// Which stored samples a second pass of rewards is over, and what changes in it.
	"services/rescore": {"pkg/view", "schemas", "pkg/bus", "pkg/estimator", "pkg/results", "pkg/scorer", "services/intake", "services/reward"},
	// Weights back to their prompts, by what made each of them.
	"services/prove": {"schemas", "pkg/bus", "pkg/estimator", "pkg/export", "pkg/models/lora", "pkg/scorer", "pkg/view", "services/advantage", "services/intake", "services/rescore", "services/reward", "services/verify"},
	// The page that shows a pipeline, by what clients read with.
	"services/trace": {"schemas", "pkg/bus", "pkg/stages", "pkg/tracing"}, // traces of what is stored
	"services/ui":    {"pkg/results", "pkg/view", "schemas", "pkg/bus", "pkg/client", "pkg/models/media", "pkg/outcomes", "services/internal/boot"},
	"services/command": {
		"pkg/models/hub",
		"pkg/view",
		"pkg/models/media", "schemas", "pkg/auth", "pkg/bus", "pkg/counters", "pkg/natsd", "pkg/flow", "pkg/models/lm", "pkg/models/lm/families", "pkg/models/model", "pkg/models/model/families", "pkg/models/safetensors", "pkg/scorer", "pkg/estimator", "pkg/dataset", "pkg/client", "pkg/models/lora", "pkg/fields", "pkg/heap", "pkg/export", "pkg/results", "pkg/outcomes", "pkg/models/tensor/devices",
		"services/intake", "services/sampler", "services/rescore", "services/reward", "services/advantage", "services/pipeline", "services/estimate", "services/verify", "services/prove", "services/teacher", "services/doctor", "services/janitor", "services/internal/boot", "services/internal/present", "services/sampler/engine/images", "services/sampler/engine/texts", "services/sampler/models", "services/sampler/weights",
		"pkg/models/tokenizer", "pkg/models/strictjson", "services/trace", "services/ui", // the page, and tokens as text on it
		"deploy", // examples
	},
	// Tools of the project and of its tests: no program and no client links them.
	"integration/tools/harness":     {"schemas", "pkg/bus", "pkg/bus/bustest"}, // processes and audits for whole-pipeline tests
	"integration/tools/chaos":       nil,                                       // faults; its tests start the pipeline
	"integration/tools/torchworker": {"pkg/models/model/remote/remotetest"},    // a worker for --engine torch without Python
	// a server for --engine sglang-diffusion without one
	"integration/tools/imageserver": {
		"pkg/flow", "pkg/models/lora", "pkg/models/media", "pkg/models/model", "pkg/models/model/families", "pkg/remoteimage", "pkg/models/safetensors", "pkg/models/tensor",
		"services/sampler/engine/images",
	},
	"integration/tools/vectors":   {"pkg/estimator", "pkg/flow", "pkg/models/decoding"}, // writes schemas/vectors
	"integration/tools/kernelgen": nil,                                                  // writes the assembly of pkg/models/tensor/cpu, pkg/models/media and pkg/flow
	"integration/tools/ptxvm":     {"pkg/models/tensor/cuda/driver"},                    // interprets the CUDA kernels
	"integration/tools/libcuda":   {"pkg/models/tensor/cuda/driver", "integration/tools/ptxvm"},
	"integration/tools/bench": {
		"pkg/models/media", "schemas", "pkg/bus", "pkg/heap", "pkg/natsd", "pkg/flow", "pkg/sampling", "pkg/models/model", "pkg/models/model/families", "pkg/models/model/remote", "pkg/models/tensor", "pkg/models/tensor/cpu", "pkg/models/tensor/devices", "services/intake", "services/sampler", "services/advantage",
		"pkg/models/decoding", "pkg/models/lm", "pkg/models/lm/families", "pkg/models/lm/qwen2/qwen2test", // random weights
		"pkg/client", "pkg/models/lora", "pkg/models/safetensors", "pkg/models/model/qwenimage/checkpoint", // weights that it pushes
		"services/sampler/engine/images", "services/sampler/engine/texts", "services/sampler/recorder",
		"pkg/models/tensor/cuda", "pkg/models/tensor/cuda/driver", "integration/tools/ptxvm", // the model of a GPU's costs
	},
}

// testLayers is what tests may import besides what their package may.
var testLayers = map[string][]string{
	"pkg/models/model/nn":  {"pkg/models/tensor/cpu"},
	"pkg/models/tokenizer": {"pkg/models/model/qwenimage/checkpoint"}, "pkg/models/lm/qwen2": {"pkg/models/lm/qwen2/qwen2test", "pkg/models/model/modeltest", "pkg/models/tensor/reference"},
	"pkg/models/model/remote":               {"pkg/models/model/modeltest", "pkg/models/model/qwenimage", "pkg/models/model/remote/remotetest"}, // whose digest is the same
	"pkg/models/model/qwenimage":            {"pkg/models/media", "pkg/models/model/modeltest", "pkg/models/model/qwenimage/checkpoint", "pkg/models/tensor/reference"},
	"pkg/models/model/qwenimage/checkpoint": {"pkg/models/model/qwenimage"},
	"pkg/models/model/synthetic":            {"pkg/models/model/modeltest", "pkg/flow", "pkg/flow/flowtest", "pkg/models/tensor"}, // chains of whole rollouts

	"pkg/bus":                        {"pkg/natsd", "pkg/bus/bustest"},
	"pkg/remoteimage":                {"pkg/remoteimage/remoteimagetest"},
	"pkg/remotelm":                   {"pkg/remotelm/remotelmtest"},
	"pkg/natsd":                      {"pkg/bus/bustest"}, // its waits
	"pkg/models/tensor/cpu":          {"pkg/models/tensor/tensortest"},
	"pkg/models/tensor/cuda":         {"pkg/models/media", "integration/tools/ptxvm", "pkg/models/tensor/tensortest", "pkg/models/tensor/reference", "pkg/models/tensor/cpu", "pkg/models/model", "pkg/models/model/qwenimage", "pkg/models/model/qwenimage/checkpoint", "pkg/models/lora", "pkg/models/safetensors", "pkg/sheet"},
	"pkg/models/tensor/cuda/kernels": {"pkg/models/tensor/cuda/driver", "integration/tools/ptxvm"},
	"pkg/models/tensor/reference":    {"pkg/models/tensor/tensortest"},
	"pkg/scheduled":                  {"pkg/flow/flowtest", "pkg/models/tensor"},
	"pkg/flow":                       {"pkg/flow/flowtest"},
	"pkg/models/lora":                {"pkg/models/tensor"},
	"pkg/client":                     {"pkg/bus/bustest", "pkg/natsd", "services/pipeline"}, // examples run against a whole pipeline
	"pkg/scorer/httpscore":           {"pkg/models/media"},
	"pkg/scorer/natsscore":           {"pkg/models/media", "pkg/natsd"},
	"services/intake":                {"pkg/bus/bustest", "pkg/models/model", "pkg/models/model/synthetic"},
	"integration/tools/bench":        {"pkg/models/model/qwenimage/checkpoint", "pkg/models/model/remote/remotetest", "integration/tools/harness", "pkg/bus/bustest"},
	"services/sampler/recorder":      {"pkg/bus/bustest", "pkg/models/model/families", "pkg/models/tensor", "services/intake"},
	"services/sampler/weights":       {"pkg/bus/bustest", "pkg/models/model", "pkg/models/model/families", "services/sampler/engine/images"},
	"services/reward":                {"pkg/bus/bustest"},
	"pkg/interaction":                {"pkg/bus/bustest"},
	"services/advantage":             {"pkg/bus/bustest"},
	"services/janitor":               {"pkg/bus/bustest"},
	"pkg/counters":                   {"pkg/bus/bustest"}, "pkg/rules": {"pkg/bus/bustest"},
	"services/internal/boot":       {"pkg/bus/bustest", "schemas"},
	"services/internal/instrument": {"pkg/bus/bustest"},
	"pkg/fields":                   {"schemas/document"},
	"pkg/models/hub":               {"pkg/models/hub/hubtest"},
	"services/command":             {"pkg/models/hub/hubtest", "pkg/bus/bustest", "pkg/models/lm/qwen2/qwen2test", "pkg/models/model/qwenimage/checkpoint"},
	"pkg/results":                  {"pkg/bus/bustest", "services/pipeline"},
	"pkg/export":                   {"pkg/bus/bustest", "pkg/results", "pkg/models/media/mediatest", "pkg/models/model/remote/remotetest", "services/pipeline"},
	"services/pipeline":            {"pkg/bus/bustest", "pkg/models/model/remote/remotetest", "pkg/natsd", "pkg/client", "pkg/results", "services/verify"},
	"services/prove":               {"pkg/bus/bustest"},
	"services/estimate":            {"pkg/bus/bustest", "pkg/models/media", "pkg/models/model"},
	"services/doctor":              {"pkg/bus/bustest"},
	"services/ui":                  {"pkg/results", "pkg/bus/bustest", "pkg/models/media/mediatest", "pkg/models/lora", "pkg/models/model/remote/remotetest", "pkg/models/tokenizer", "pkg/natsd", "services/intake", "services/pipeline", "services/reward"},
	"services/trace":               {"pkg/bus/bustest", "pkg/client", "services/pipeline"},
	"services/verify": {
		"pkg/bus/bustest", "pkg/client", "pkg/models/lora", "pkg/models/media", "pkg/models/model/remote/remotetest", "pkg/models/safetensors", "services/pipeline",
	},
	"services/teacher": {"pkg/bus/bustest", "pkg/client", "pkg/models/lm/qwen2/qwen2test", "pkg/models/media", "pkg/models/model/qwenimage/checkpoint", "pkg/models/model/remote/remotetest", "services/pipeline"},
	"integration/tools/chaos": {
		"integration/tools/harness", "schemas", "pkg/bus", "pkg/bus/bustest", "pkg/client", "pkg/counters", "services/pipeline",
		"services/sampler", // of texts, beside the pipeline's
	},

	"services/sampler": {"pkg/bus/bustest", "pkg/flow", "pkg/models/model/qwenimage/checkpoint", "services/intake"},
	"services/sampler/engine/images": {
		"pkg/models/model/families", "pkg/remoteimage/remoteimagetest", "services/sampler/engine/enginetest",
	},
	"integration/tools/imageserver": {"pkg/remoteimage/remoteimagetest"},
	"services/sampler/engine/texts": {"pkg/models/lm/families", "pkg/models/lm/qwen2", "pkg/models/lm/qwen2/qwen2test", "pkg/models/model", "pkg/models/safetensors", "services/sampler/engine/enginetest"},
	"services/sampler/models":       {"pkg/models/model/families"},
}

// dependency is a module outside the project: why it is here, and who may import it.
type dependency struct {
	why   string
	users []string // packages; a trailing "/..." includes what is below
	tests bool     // any package's tests may import it
}

// dependencies is every module the project imports. A new one needs a line and a
// reason here; one no one imports any more must go.
var dependencies = map[string]dependency{
	"github.com/invopop/jsonschema":         {why: "JSON Schema from the event structs", users: []string{"schemas/document"}},
	"github.com/mattn/go-runewidth":         {why: "columns of a text on a terminal, wide runes too; mpb's own", users: []string{"services/internal/present"}},
	"github.com/KimMachineGun/automemlimit": {why: "the memory that a process may have: of its cgroup, version 1 or 2, or of the machine", users: []string{"pkg/heap"}},
	"github.com/nats-io/nats-server":        {why: "the embedded server; it must not reach clients or the four service binaries", users: []string{"pkg/natsd", "integration"}},
	"github.com/nats-io/nkeys":              {why: "keys of users: made by meander auth, proved to the embedded server", users: []string{"pkg/natsd", "pkg/auth"}},
	"github.com/nats-io/nats.go":            {why: "the event plane's client", users: []string{"pkg/auth", "pkg/bus/...", "pkg/counters", "pkg/natsd", "pkg/client", "pkg/interaction", "pkg/scorer/natsscore", "pkg/scorer/scorerfile", "services/...", "integration/..."}},
	"github.com/synadia-io/orbit.go":        {why: "contexts of the nats command", users: []string{"pkg/bus"}},
	"github.com/parquet-go/parquet-go":      {why: "Parquet files of runs that are exported as datasets, and of prompts", users: []string{"pkg/export", "pkg/dataset"}, tests: true},
	"github.com/prometheus/client_golang":   {why: "counters and gauges as Prometheus reads them", users: []string{"services/...", "integration/..."}},
	"github.com/rs/zerolog":                 {why: "structured logs without allocation", users: []string{"pkg/bus/...", "pkg/natsd", "pkg/client", "pkg/view", "services/...", "integration/..."}, tests: true},
	"github.com/santhosh-tekuri/jsonschema": {why: "checks the golden events against the generated schemas", tests: true},
	"github.com/spf13/cobra":                {why: "subcommands of the command line", users: []string{"services/command", "integration/tools/bench"}},
	"github.com/spf13/pflag":                {why: "flags in the usual spelling; cobra's own", users: []string{"pkg/fields", "services/command", "services/internal/boot"}},
	"github.com/vbauerster/mpb":             {why: "progress bars of meander run", users: []string{"services/command"}},
	"github.com/vmihailenco/msgpack":        {why: "the encoding of events, of counts, of calls to workers, and of answers", users: []string{"schemas/...", "pkg/strictmsgpack", "pkg/counters", "services/command", "pkg/scorer/...", "pkg/models/model/remote/..."}, tests: true},
	"github.com/zeebo/blake3":               {why: "BLAKE3 with AVX2: digests of large tensors in half the time of SHA-256", users: []string{"schemas"}},
	"go.opentelemetry.io/otel":              {why: "traces as OpenTelemetry has them, by OTLP over HTTP", users: []string{"services/trace", "services/command"}},
	"go.opentelemetry.io/proto/otlp":        {why: "reads in a test what comes to a collector", tests: true},
	"google.golang.org/protobuf":            {why: "reads in a test what comes to a collector", tests: true},
	"go.uber.org/goleak":                    {why: "no goroutine outlives its owner", tests: true},
	"go.yaml.in/yaml":                       {why: "YAML with order and comments: settings of programs, AsyncAPI", users: []string{"pkg/fields", "schemas/document", "pkg/scorer/scorerfile"}, tests: true},
	"gorgonia.org/cu":                       {why: "the calls of the CUDA driver, with the tag cuda only", users: []string{"pkg/models/tensor/cuda/internal/gpu", "pkg/models/tensor/cuda/internal/cuext"}},
	"golang.org/x/image":                    {why: "text and scaling on contact sheets, images enlarged for tesseract and reduced for reports", users: []string{"services/ui", "services/sampler/engine/images", "pkg/sheet", "pkg/scorer"}},
	"golang.org/x/sync":                     {why: "errgroup: goroutines with an owner", users: []string{"pkg/...", "services/...", "integration/..."}},
	"golang.org/x/sys":                      {why: "mmap, file locks, CPU features; pseudo-terminals in tests", users: []string{"pkg/models/safetensors", "pkg/models/tensor/cpu", "pkg/models/media", "pkg/flow", "pkg/natsd", "integration/..."}},
	"golang.org/x/term":                     {why: "is this a terminal, how wide, and its keys", users: []string{"services/internal/boot", "services/internal/present", "services/command", "integration/tools/bench"}},
	"golang.org/x/time":                     {why: "rate limits of remote reward functions", users: []string{"pkg/scorer/httpscore"}},
	"golang.org/x/text":                     {why: "Unicode normal forms of the tokenizer", users: []string{"pkg/models/tokenizer"}},
	"pgregory.net/rapid":                    {why: "laws, tested with generated cases", tests: true},
}

// goPackage is the imports of one folder, over all build tags and architectures.
type goPackage struct {
	code, tests map[string]bool
}

// readPackages parses the imports of every Go file. It reads the files itself, and not
// through the go command, so that the test cache notices when one changes.
func readPackages(t *testing.T) map[string]*goPackage {
	t.Helper()
	packages := map[string]*goPackage{}
	walkFiles(t, func(name string) {
		if !strings.HasSuffix(name, ".go") || strings.Contains(name, "testdata/") {
			return
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		dir := path.Dir(name)
		p := packages[dir]
		if p == nil {
			p = &goPackage{code: map[string]bool{}, tests: map[string]bool{}}
			packages[dir] = p
		}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(name, "_test.go") {
				p.tests[imported] = true
			} else {
				p.code[imported] = true
			}
		}
	})
	if len(packages) < 5 {
		t.Fatalf("found %d packages; the walk is broken", len(packages))
	}
	return packages
}

// walkFiles calls visit with every file of the repository by its slash-separated path,
// leaving out what git ignores at the top.
func walkFiles(t *testing.T, visit func(name string)) {
	t.Helper()
	skip := map[string]bool{
		".git": true, ".tools": true, ".venv": true, "bin": true, "build": true,
		"meander-data": true, "meander-out": true,
	}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if skip[rel] || entry.Name() == "__pycache__" {
				return fs.SkipDir
			}
			return nil
		}
		visit(filepath.ToSlash(rel))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The appendix of the guide shows both tables, from the top down, as they are here.
func TestImports_Document(t *testing.T) {
	sequential(t)
	var code, modules strings.Builder
	height := map[string]int{} // of the tower of packages below
	var measure func(dir string) int
	measure = func(dir string) int {
		if _, known := height[dir]; !known {
			for _, below := range layers[dir] {
				height[dir] = max(height[dir], 1+measure(below))
			}
		}
		return height[dir]
	}
	dirs := slices.SortedFunc(maps.Keys(layers), func(a, b string) int {
		return cmp.Or(cmp.Compare(measure(b), measure(a)), strings.Compare(a, b))
	})
	code.WriteString("| package | may import |\n|---|---|\n")
	for _, dir := range dirs {
		line := fmt.Sprintf("| `%s` |", dir)
		for _, below := range slices.Sorted(slices.Values(layers[dir])) {
			if len(line)+len(below)+5 > 120 { // a row goes on in the next one
				code.WriteString(line + " |\n")
				line = "| |"
			}
			line += " `" + below + "`"
		}
		if len(layers[dir]) == 0 {
			line += " nothing of the project"
		}
		code.WriteString(line + " |\n")
	}
	modules.WriteString("| module | why | imported by |\n|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(dependencies)) {
		d := dependencies[name]
		users := make([]string, len(d.users))
		for i, user := range d.users {
			users[i] = "`" + user + "`"
		}
		if d.tests {
			users = append(users, "tests")
		}
		fmt.Fprintf(&modules, "| `%s` | %s | %s |\n", strings.TrimPrefix(name, "github.com/"), d.why,
			strings.Join(users, " "))
	}
	inDocument(t, "deploy/guide/appendix.md", "packages", code.String())
	inDocument(t, "deploy/guide/appendix.md", "modules", modules.String())
}

// inDocument holds the part of a document between the comments <!-- name --> and
// <!-- /name --> to be text; with -update it writes it.
func inDocument(t *testing.T, document, name, text string) {
	t.Helper()
	path := filepath.Join(root, document)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, begins := strings.Cut(string(data), "<!-- "+name+" -->\n")
	old, tail, ends := strings.Cut(rest, "<!-- /"+name+" -->\n")
	switch {
	case !begins || !ends:
		t.Fatalf("%s has no part between <!-- %s --> and <!-- /%s -->", document, name, name)
	case old == text:
	case *update:
		written := head + "<!-- " + name + " -->\n" + text + "<!-- /" + name + " -->\n" + tail
		if err := os.WriteFile(path, []byte(written), 0o600); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("%s: the table %s is stale: go test ./integration -run '^%s$' -update", document, name, t.Name())
	}
}

func TestImports_Layers(t *testing.T) {
	sequential(t)
	t.Parallel()
	packages := readPackages(t)
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		if dir == "integration" {
			continue // tests of the whole may use the whole
		}
		allowed, known := layers[dir]
		if !known {
			t.Errorf("%s: no line in layers; add one that says what it may import", dir)
			continue
		}
		check := func(kind string, imports map[string]bool, allowed []string) {
			for _, imported := range slices.Sorted(maps.Keys(imports)) {
				inner, ours := strings.CutPrefix(imported, module+"/")
				if ours && inner != dir && !slices.Contains(allowed, inner) {
					t.Errorf("%s: %s imports %s; it may import %v", dir, kind, inner, allowed)
				}
			}
		}
		check("code", packages[dir].code, allowed)
		check("test", packages[dir].tests, slices.Concat(allowed, testLayers[dir]))
	}
}

// The table itself must keep the promises the architecture makes, whatever is added to it.
func TestImports_LayersKeepTheirPromises(t *testing.T) {
	sequential(t)
	t.Parallel()
	for dir, allowed := range layers {
		for _, below := range allowed {
			if _, known := layers[below]; !known {
				t.Errorf("%s may import %s, which is not in layers", dir, below)
			}
			if isTool(below) && !isTool(dir) {
				t.Errorf("layers lets %s import the tool %s", dir, below)
			}
			if strings.HasPrefix(dir, modelsFolder) && !strings.HasPrefix(below, modelsFolder) && below != "deploy" {
				t.Errorf("layers lets %s import %s; what models are made of imports nothing else of the project", dir,
					below)
			}
		}
	}
	services := []string{"services/intake", "services/sampler", "services/reward", "services/advantage"}
	forbidden := map[string][]string{
		"pkg/flow":                  {"pkg/models/model", "pkg/bus", "schemas"},
		"pkg/models/model/families": {"pkg/flow", "pkg/bus", "schemas"},
		"pkg/auth":                  {"pkg/natsd", "pkg/bus"},
		"pkg/bus":                   {"pkg/natsd", "pkg/flow", "pkg/models/model"},
		"pkg/client":                {"pkg/natsd", "pkg/flow", "pkg/models/model"},
		"schemas/document":          {"pkg/bus", "pkg/natsd"},
	}
	for _, s := range services {
		forbidden[s] = append(slices.Clone(services), "pkg/natsd", "services/internal/boot")
		forbidden["services/cmd/meander-"+path.Base(s)] = []string{"pkg/natsd"}
	}
	for from, targets := range forbidden {
		reach := reachable(from, func(dir string) []string { return layers[dir] })
		for _, target := range targets {
			if target != from && reach[target] {
				t.Errorf("layers lets %s reach %s", from, target)
			}
		}
	}
}

// modelsFolder is the folder of what models are made of.
const modelsFolder = "pkg/models/"

// isTool says whether a package is a tool, which no package of the product may import.
func isTool(dir string) bool { return strings.HasPrefix(dir, "integration/") }

// The server is large and opens files and sockets: programs that only talk to one do not carry it.
func TestImports_NoServerInClients(t *testing.T) {
	sequential(t)
	t.Parallel()
	packages := readPackages(t)
	below := func(dir string) []string {
		var dirs []string
		if p := packages[dir]; p != nil {
			for imported := range p.code {
				if inner, ours := strings.CutPrefix(imported, module+"/"); ours {
					dirs = append(dirs, inner)
				}
			}
		}
		return dirs
	}
	checked := 0
	for dir := range packages {
		if dir != "pkg/client" && !strings.HasPrefix(dir, "services/cmd/meander-") {
			continue
		}
		checked++
		for reached := range reachable(dir, below) {
			for imported := range packages[reached].code {
				if strings.HasPrefix(imported, "github.com/nats-io/nats-server") {
					t.Errorf("%s reaches %s, which imports %s", dir, reached, imported)
				}
			}
		}
	}
	if checked < 4 {
		t.Errorf("checked %d programs; want the four services' at least", checked)
	}
}

// reachable is from and everything below it.
func reachable(from string, below func(string) []string) map[string]bool {
	seen := map[string]bool{}
	todo := []string{from}
	for len(todo) > 0 {
		dir := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if !seen[dir] {
			seen[dir] = true
			todo = append(todo, below(dir)...)
		}
	}
	return seen
}
