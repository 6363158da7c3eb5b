package remote

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/models/model"
)

// Families returns the classes that only workers compute, so that a program which finds a folder of one can say so:
// their Open and Inspect are errors with what to do. Open and Inspect of this package take folders of any class.
func Families() (list model.Registry) {
	for _, is := range [][2]string{
		{"flux1", "FluxPipeline"},
		{"flux2", "Flux2Pipeline"},
		{"flux2-klein", "Flux2KleinPipeline"},
		{"hunyuan-video", "HunyuanVideoPipeline"},
		{"krea2", "Krea2Pipeline"},
		{"ltx", "LTXPipeline"},
		{"sd3", "StableDiffusion3Pipeline"},
		{"wan", "WanPipeline"},
		{"z-image", "ZImagePipeline"},
	} {
		name, class := is[0], is[1]
		refuse := func(dir string) error {
			return fmt.Errorf("model %q: %s is computed by the torch engine: --engine torch; %s", dir, class, Install)
		}
		list = append(list, model.Family{
			Name: name, Class: class,
			Open:    func(dir string, _ model.Options) (model.Model, error) { return nil, refuse(dir) },
			Inspect: func(dir string) (*model.Info, error) { return nil, refuse(dir) },
		})
	}
	return list
}
