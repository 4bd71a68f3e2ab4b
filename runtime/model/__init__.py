"""The models' blocks, a layer at a time: GLM-5.x, Kimi K2 and DeepSeek-V3 (MLA), GLM-4.x (GQA)."""
