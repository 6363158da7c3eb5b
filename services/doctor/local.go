package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/models/lm"
	languages "github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler/models"
)

// mostOpened, in bytes: of a larger folder only the headers are read, not the weights.
const mostOpened = 1 << 30

// checkModelFolder checks the model of samplers on this machine: its files, its weights, and that lanes serve the
// same ones.
func checkModelFolder(ctx context.Context, o *Options, say *notes) {
	if o.Model == "" {
		say.add(Unchecked, "name a folder with --model", "the model of samplers elsewhere cannot be seen from here")
		return
	}
	if models.IsTorch(o.Engine) {
		checkWorkerModel(ctx, o, say)
		return
	}
	dir, family, err := families.All().Find(o.Model)
	if errors.Is(err, model.ErrUnknown) {
		if _, _, found := languages.All().Find(o.Model); found == nil {
			checkLanguageFolder(ctx, o, say)
			return
		}
	}
	if err != nil {
		say.add(Fault, "name a folder in the diffusers layout, or a model that ships (--model)", "%v", err)
		return
	}
	if dir == "" {
		say.ok("%s, which needs no files", o.Model)
		return
	}
	info, err := family.Inspect(dir)
	if err != nil {
		say.add(Fault, "see 'meander model info "+o.Model+"'", "%v", err)
		return
	}
	if bytes, complete := checkModelFiles(o, say, dir, info); !complete || bytes > mostOpened {
		if complete {
			reportUnread(say, bytes, info.Name+" in "+dir, "")
		}
		return
	}
	m, err := families.All().Open(o.Model, model.Options{})
	if err != nil {
		say.add(Fault, "copy the folder again, with all its files", "%v", err)
		return
	}
	say.ok("%s in %s loads, weights %.12s", info.Name, dir, m.Card().WeightsDigest)
	checkSameWeights(ctx, o, say, info.Name, m.Card().WeightsDigest, m)
}

// reportUnread reports a model whose files are complete, and of which the weights are not read. more is said of it.
func reportUnread(say *notes, bytes int, what, more string) {
	size := boot.Bytes(bytes).Rough()
	say.ok("%s is complete: %s%s", what, size, more)
	say.add(Unchecked, "samplers read and hash all of it when they start",
		"weights of %s are not read here, nor their digest compared", size)
}

// checkModelFiles reports the problems of a model's folder; complete says that there are none. bytes is the size of
// its weights.
func checkModelFiles(o *Options, say *notes, dir string, info *model.Info) (bytes int, complete bool) {
	for i, p := range info.Problems {
		if i == 3 {
			say.add(Fault, "see 'meander model info "+o.Model+"'", "and %d more problems", len(info.Problems)-i)
			break
		}
		say.add(Fault, "copy the folder again, with all its files", "%s: %s", dir, p)
	}
	for _, p := range info.Parts {
		bytes += p.FileBytes
	}
	return bytes, len(info.Problems) == 0
}

// checkWorkerModel is checkModelFolder for a model that a worker in Python computes: a worker must be there, and know
// the model's class.
func checkWorkerModel(ctx context.Context, o *Options, say *notes) {
	t := models.TorchAt(o.Engine, o.EngineKey, models.Compute{})
	t.Wait = o.Timeout / 2
	dir, info, err := t.Inspect(ctx, o.Model)
	if err != nil {
		say.add(Fault, "do what the message says, and see 'meander model info --engine "+o.Engine+" "+o.Model+"'", "%v",
			err)
		return
	}
	if bytes, complete := checkModelFiles(o, say, dir, info); complete {
		reportUnread(say, bytes, info.Name+" in "+dir, ", and a worker knows it: "+info.Backend)
	}
}

// checkLanguageFolder is checkModelFolder for a language model.
func checkLanguageFolder(ctx context.Context, o *Options, say *notes) {
	m, err := languages.All().Open(o.Model, lm.Options{})
	if err != nil {
		say.add(Fault, "copy the folder again, with all its files", "%v", err)
		return
	}
	card := m.Card()
	say.ok("%s, a language model of %d tokens, loads, weights %.12s", card.Name, card.Vocabulary, card.WeightsDigest)
	checkSameWeights(ctx, o, say, card.Name, card.WeightsDigest, m)
}

// checkSameWeights warns of lanes that serve the model of that name on another checkpoint than digest, whatever was
// pushed to them. It closes the model.
func checkSameWeights(ctx context.Context, o *Options, say *notes, name, digest string, m io.Closer) {
	if err := m.Close(); err != nil {
		say.addFailure("close the model", err)
	}
	if o.Bus == nil {
		return
	}
	policies, err := o.Bus.Policies(ctx)
	if err != nil {
		say.addFailure("what samplers serve", err)
		return
	}
	for _, p := range policies {
		checkpoint := cmp.Or(p.BaseDigest, p.WeightsDigest)
		if p.Model == name && p.Tenant == schemas.TenantMain && checkpoint != digest {
			say.add(Warning, "give all samplers of a lane the same folder, or lanes of their own",
				"lane %s was last served with another checkpoint, %.12s", p.Lane, checkpoint)
		}
	}
}

// checkDevice checks what computes on this machine: CPU kernels and GPUs.
func checkDevice(_ context.Context, o *Options, say *notes) {
	if o.Device == "" {
		say.add(Unchecked, "name one with --device", "the devices of samplers elsewhere cannot be seen from here")
		return
	}
	if models.IsTorch(o.Engine) {
		say.add(Unchecked, "see the log of the sampler", "device %s is one of the worker (--engine %s)", o.Device,
			o.Engine)
		return
	}
	kernels := cpu.AvailableKernels()
	if len(kernels) > 1 {
		say.ok("CPU: %d threads, %s kernels", runtime.GOMAXPROCS(0), kernels[0])
	} else {
		say.add(Warning, "use a machine with AVX2 or AVX-512, or a GPU: the portable kernels are many times slower",
			"CPU: %d threads of %s, without vector instructions that there are kernels for", runtime.GOMAXPROCS(0),
			runtime.GOARCH)
	}
	if o.Device == devices.CPU {
		return
	}
	gpus, old, why := devices.GPUs()
	for _, text := range old {
		say.add(Warning, "hide it with CUDA_VISIBLE_DEVICES, or put a newer one in its place", "CUDA: %s", text)
	}
	switch err := devices.Available(o.Device); {
	case errors.Is(err, devices.ErrUnavailable):
		say.add(Fault, "take --device auto or cpu, or repair what the message says", "%v", err)
	case err != nil:
		say.add(Fault, "name cpu, auto or GPUs such as cuda:0 (--device)", "%v", err)
	case gpus > len(old):
		say.ok("CUDA: %s", present.Count(gpus-len(old), "GPU"))
	case gpus > 0:
		say.add(Warning, "compute on the CPU, or with a newer GPU", "CUDA: no GPU that is new enough")
	default:
		say.ok("CUDA: not used: %v", why)
	}
}

// checkRewards checks the reward functions of this machine: each must score a small image, video or text.
func checkRewards(ctx context.Context, o *Options, say *notes) {
	if o.Scorers == "" && o.Model == "" {
		say.add(Unchecked, "name their file with --scorers",
			"the reward functions of services elsewhere cannot be seen from here")
		return
	}
	var nc *nats.Conn
	if o.Bus != nil {
		nc = o.Bus.Conn()
	}
	cfg := reward.DefaultConfig()
	cfg.Scorers = o.Scorers
	local, stop := context.WithTimeout(context.WithoutCancel(ctx), busy*o.Timeout)
	defer stop()
	probes, err := reward.Probe(ctx, local, cfg, nc)
	if err != nil {
		say.add(Fault, "correct the file of --scorers", "%v", err)
		return
	}
	var good []string
	for _, p := range probes {
		switch {
		case p.Err == nil:
			good = append(good, p.Name)
		case errors.Is(p.Err, context.DeadlineExceeded):
			say.add(Fault, rewardFix(p.Name)+moreTime, "%s gives no score: no answer within %v", p.Name, o.Timeout)
		case p.Configured:
			say.add(Fault, rewardFix(p.Name), "%s gives no score: %s", p.Name,
				strings.ReplaceAll(p.Err.Error(), "\n", "; "))
		default:
			say.add(Warning, rewardFix(p.Name), "%s: %v", p.Name, p.Err)
		}
	}
	if len(good) > 0 {
		say.ok("give a score: %s", strings.Join(good, ", "))
	}
}

// rewardFix says what to do about a reward function that gives no score.
func rewardFix(name string) string {
	kind, instance, _ := strings.Cut(name, ":")
	switch kind {
	case "http":
		return "start its server, or correct its url in the file of --scorers"
	case "nats":
		return fmt.Sprintf("start a worker of %s: deploy/scorers", instance)
	case "ocr":
		return "apt-get install tesseract-ocr, if prompts are to name ocr"
	}
	return "see the message"
}
