"""What training needs beside gradients: codes of weights that change, and where gradients go."""
