package models

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
)

// slow is a family whose models take until all of them are being opened.
func slow(openings int, open func(o model.Options) (model.Model, error)) model.Family {
	var begun sync.WaitGroup
	begun.Add(openings)
	return model.Family{Name: "slow", Open: func(_ string, o model.Options) (model.Model, error) {
		begun.Done()
		together := make(chan struct{})
		go func() { begun.Wait(); close(together) }()
		select {
		case <-together:
			return open(o)
		case <-time.After(time.Minute):
			return nil, errors.New("opened alone")
		}
	}}
}

func onCPUs(t *testing.T, names ...string) (on []devices.Device) {
	t.Helper()
	for _, name := range names {
		set, err := devices.Open(devices.CPU, devices.Options{Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = set.Close() })
		on = append(on, devices.Device{Device: set.Devices[0].Device, ID: name})
	}
	return on
}

// Devices open side by side, each with a model of its own and of the same digest, hashed once; progress is that of the
// one that is furthest behind.
func TestCompute_OpensSideBySide(t *testing.T) {
	on := onCPUs(t, "cuda:0", "cuda:1")
	var mu sync.Mutex
	var hashes []*safetensors.Hashes
	read := map[string][]int{}
	family := slow(2, func(o model.Options) (model.Model, error) {
		mu.Lock()
		hashes = append(hashes, o.Hashes)
		mu.Unlock()
		return families.All().Open("../../../deploy/models/signs", o)
	})
	progress := func(part string, done, _ int) { read[part] = append(read[part], done) }
	known := Registry{Images: model.Registry{family}}
	all, err := Compute{Threads: 1}.openAll(known, "slow", model.Options{Progress: progress}, on)
	if err != nil {
		t.Fatal(err)
	}
	opened := Devices{All: all}
	if opened.IDs() != "cuda:0,cuda:1" || hashes[0] == nil || hashes[0] != hashes[1] {
		t.Errorf("opened %s with hashes %v", opened.IDs(), hashes)
	}
	if a, b := all[0].Network.Digest(), all[1].Network.Digest(); a != b {
		t.Errorf("digests %s and %s", a, b)
	}
	for _, part := range []string{"text_encoder", "transformer", "vae"} {
		if !slices.IsSorted(read[part]) || len(read[part]) == 0 {
			t.Errorf("%s: progress of %v bytes", part, read[part])
		}
	}
	if err := opened.Close(); err != nil {
		t.Error(err)
	}
}

// What hinders all devices is said once, and what hinders one beside it; those that opened are returned, to be closed.
func TestCompute_OpensNotAll(t *testing.T) {
	on := onCPUs(t, "cuda:0", "cuda:1", "cuda:2", "cuda:3")
	fault := map[any]error{
		on[0].Device: errors.New("no vae"), on[1].Device: errors.New("no vae"), on[2].Device: errors.New("no memory"),
	}
	family := slow(4, func(o model.Options) (model.Model, error) {
		if err := fault[o.Device]; err != nil {
			return nil, err
		}
		return families.All().Open("synthetic", o)
	})
	all, err := Compute{}.openAll(Registry{Images: model.Registry{family}}, "slow", model.Options{}, on)
	if err == nil || err.Error() != "no vae\nno memory" || len(all) != 1 || all[0].ID != "cuda:3" {
		t.Errorf("opened on %v: %v", all, err)
	}
}

// Workers of several devices share the digest of the files, too.
func TestTorch_HashesOnce(t *testing.T) {
	configs := TorchAt(engineTorch, "", Compute{Device: "cuda:0,cuda:1"}).configs(zerolog.Nop())
	if len(configs) != 2 || configs[0].Hashes == nil || configs[0].Hashes != configs[1].Hashes {
		t.Errorf("the settings of workers are %+v", configs)
	}
}
