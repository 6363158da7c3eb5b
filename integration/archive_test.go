package integration_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/schemas"
)

// An archive has every event of a run and every blob that is stored for it: images to start with, latents
// that were rolled, conditioning, requests that are parked and those in the queue.
func TestArchive_Whole(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	data := &schemas.Data{}
	for i := range 2 {
		data.Images = append(data.Images, schemas.DataImage{Data: paint(t, 64, 64, 60*i)})
	}
	prompt := func(uid schemas.UID) *schemas.Prompt {
		return &schemas.Prompt{
			UID: uid, Prompt: "a red fox", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{
				Start: &schemas.Start{Data: data},
				ScheduledSampling: &schemas.ScheduledSampling{
					MaxStepOffset: new(int64(10)), Probability: new(1.0),
					Timesteps: new(int64(50)), Decode: true,
				},
			},
		}
	}
	w.rolled(t, "r", prompt("rolled"))
	if _, err := w.client.Control(t.Context(), &schemas.Control{Run: "r", Action: schemas.ControlPause}); err != nil {
		t.Fatal(err)
	}
	data.Images[0].Data = paint(t, 64, 64, 250) // which only requests name
	if _, err := w.client.Publish(t.Context(), "r", prompt("parked")); err != nil {
		t.Fatal(err)
	}
	queued := &schemas.Request{}
	for _, m := range bustest.Await(t, w.Bus, 2, schemas.StreamParked,
		schemas.Address{Kind: schemas.KindParked, Run: "r"}.Filter()) {
		queued = (*schemas.Request)(bustest.Decode[schemas.Parked](t, m))
	}
	queued.Lane = "nobody"
	if _, err := w.Publish(t.Context(), queued); err != nil {
		t.Fatal(err)
	}

	var file bytes.Buffer
	wrote, err := export.WriteArchive(t.Context(), w.Bus, "r", &file)
	if err != nil || wrote.Missing != 0 || wrote.LeftOut != 0 {
		t.Fatalf("%+v, %v", wrote, err)
	}
	read, blobs, named := map[string]int{}, map[string]bool{}, map[string]bool{}
	for e, err := range export.ReadArchive(&file) {
		if err != nil {
			t.Fatal(err)
		}
		for _, ref := range e.Refs() {
			named[ref.Digest] = true
		}
		if e.Blob != "" {
			blobs[e.Blob] = true
		} else {
			read[e.Stream]++
		}
	}
	if fmt.Sprint(read) != fmt.Sprint(wrote.Events) || read[schemas.StreamParked] != 2 ||
		read[schemas.StreamRequests] != 1 || read[schemas.StreamGroups] < 3 {
		t.Errorf("read %v, wrote %v", read, wrote.Events)
	}
	store, err := w.JetStream().ObjectStore(t.Context(), schemas.BlobBucket)
	if err != nil {
		t.Fatal(err)
	}
	stored, err := store.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, blob := range stored {
		if !blobs[blob.Name] || !named[blob.Name] {
			t.Errorf("blob %s: in the archive %v, named there %v", blob.Name, blobs[blob.Name], named[blob.Name])
		}
	}
	if len(blobs) != len(stored) || wrote.Blobs != len(stored) {
		t.Errorf("%d blobs in the archive, %d stored", len(blobs), len(stored))
	}
}
